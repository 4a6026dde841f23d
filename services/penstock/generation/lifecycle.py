"""Lifecycle of the process: is there a model, and does it take work. Every change of state is a method here."""

from __future__ import annotations

import asyncio
import enum
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from penstock.common.errors import FailedPrecondition, PenstockError, Unavailable
from penstock.generation.service import GenerationCore

STARTING_RETRY_SECONDS = 1.0


class ModelState(enum.Enum):
    """State of the model (penstock.v1.ModelState)."""

    LOADING = 1
    READY = 2
    DRAINING = 3
    UNAVAILABLE = 4
    EMPTY = 5


# Ways from each state; from UNAVAILABLE, which is the end of a process, there is none.
_NEXT = {
    ModelState.EMPTY: {ModelState.LOADING, ModelState.UNAVAILABLE},
    # DRAINING: the process began to stop meanwhile.
    ModelState.LOADING: {ModelState.READY, ModelState.DRAINING, ModelState.EMPTY, ModelState.UNAVAILABLE},
    ModelState.READY: {ModelState.DRAINING, ModelState.UNAVAILABLE},
    ModelState.DRAINING: {ModelState.READY, ModelState.EMPTY, ModelState.UNAVAILABLE},
}


class Pause(NamedTuple):
    """Pause of the engine's steps; `begun` is a time of time.monotonic()."""

    number: int
    begun: float


class Reloaded(NamedTuple):
    """Result of a Reload: seconds after the last request's end, and the requests that its grace aborted."""

    seconds: float
    aborted: int


class Lifecycle:
    """Lifecycle of the process. It belongs to one event loop; a loading thread notes its progress.

    A transition changes the state at once; `show_health` after it tells those who watch.
    """

    def __init__(self, model_name: str, *, aliases: tuple[str, ...] = ()) -> None:
        """Begin with a load of that model, or to become empty. `aliases`: further names of the process's model."""
        # Tells this process from one that came before it at the same address.
        self.start_id = secrets.token_hex(8)
        self.aliases = aliases
        self._model_name = model_name
        self._state = ModelState.LOADING
        self._core: GenerationCore | None = None
        self._percent_loaded = 0.0
        self._load_stage = ""
        self._num_loads = 0
        # Drains without a way back: the process is stopping, or its model is being unloaded.
        self._is_stopping = self._is_unloading = False
        self._is_hung = False
        # The present pause, and the number of pauses so far.
        self._pause: Pause | None = None
        self._num_pauses = 0
        # The Reload that is under way, and True when the process takes new work after it.
        self._reload: asyncio.Task[Reloaded] | None = None
        self._resumes_after_reload = False
        self._set_serving: Callable[[bool], Awaitable[None]] = _ignore

    @property
    def model_name(self) -> str:
        """Name of the model; empty while there is none."""
        return self._model_name

    @property
    def state(self) -> ModelState:
        """State of the model."""
        return self._state

    @property
    def core(self) -> GenerationCore | None:
        """Core of the loaded model; None while there is none."""
        return self._core

    @property
    def percent_loaded(self) -> float:
        """Part of the weights that are read, in percent."""
        return self._percent_loaded

    @property
    def load_stage(self) -> str:
        """Stage of the load under way; empty without one."""
        return self._load_stage

    @property
    def num_loads(self) -> int:
        """Number of loads that ended well."""
        return self._num_loads

    @property
    def is_stopping(self) -> bool:
        """True once the process has begun to stop."""
        return self._is_stopping

    @property
    def has_ended(self) -> bool:
        """True once the process has failed, or is closing: it takes no work again. Thread-safe."""
        return self._state is ModelState.UNAVAILABLE

    @property
    def paused_seconds(self) -> float | None:
        """Time that the present pause has lasted; None: there is none."""
        return None if self._pause is None else time.monotonic() - self._pause.begun

    @property
    def is_reloading(self) -> bool:
        """True while a Reload is under way."""
        return self._reload is not None

    def loaded(self) -> GenerationCore:
        """Return the core. Raises Unavailable while the model loads, after it failed, and where there is none."""
        if self._core is None or self._state in (ModelState.LOADING, ModelState.UNAVAILABLE):
            raise self._unavailable()
        return self._core

    def accepting(self) -> GenerationCore:
        """Return the core for new work. Raises Unavailable also while draining."""
        if self._state is ModelState.DRAINING:
            raise Unavailable("this process is draining: send new work elsewhere", reason="DRAINING")
        if self._is_hung:
            raise Unavailable("a step of the engine hangs: send new work elsewhere", reason="ENGINE_HUNG")
        return self.loaded()

    def _unavailable(self) -> PenstockError:
        if self._state is ModelState.LOADING:
            return Unavailable(
                "the model is still loading", reason="STARTING", retry_after_seconds=STARTING_RETRY_SECONDS
            )
        if self._state in (ModelState.EMPTY, ModelState.DRAINING):
            return _no_model()
        return Unavailable("the engine of this process has failed", reason="ENGINE_FAILED")

    # A model comes.

    def begin_load(self, model_name: str) -> None:
        """Begin to load a model into the empty process."""
        self._go(ModelState.LOADING)
        self._model_name = model_name

    def note_percent(self, percent: float) -> None:
        """Note the part of the weights that are read. Thread-safe."""
        self._percent_loaded = percent

    def note_stage(self, stage: str) -> None:
        """Note the stage of the load under way. Thread-safe."""
        self._load_stage = stage

    def serve(self, core: GenerationCore) -> None:
        """Take work with the model that was loaded, unless the process is stopping by now."""
        self._core = core
        self._percent_loaded, self._load_stage = 100.0, ""
        self._num_loads += 1
        self._go(ModelState.DRAINING if self._is_stopping else ModelState.READY)

    # It takes no new work for a while.

    def start_drain(self) -> None:
        """Begin to refuse new work, until `resume`. Live requests go on: a pause ends."""
        self._resumes_after_reload = False
        self._step_again()
        if self._state is ModelState.READY:
            self._go(ModelState.DRAINING)
            self._notify()

    def resume(self) -> None:
        """Take new work again. Raises Unavailable once the process is stopping, or the model is being unloaded, and
        FailedPrecondition during a Reload."""
        if self._is_stopping or self._is_unloading:
            what = "process is stopping" if self._is_stopping else "model is being unloaded"
            raise Unavailable(f"this {what}: send new work elsewhere", reason="DRAINING")
        if self._reload is not None:
            raise FailedPrecondition("a Reload is under way: resume after it", reason="BUSY")
        self._step_again()
        if self._state is ModelState.DRAINING:
            self._go(ModelState.READY)
            self._notify()

    async def pause(self, seconds: float) -> None:
        """Refuse new work and hold the engine's steps, until `resume`, or for `seconds` at most.

        It returns once no step runs. Live requests keep their blocks and go on afterwards; aborts and deadlines end
        them at once. A second pause takes the place of the first. Raises Unavailable as `accepting`.
        """
        core = self.accepting() if self._pause is None else self.loaded()
        self._num_pauses += 1
        self._pause = Pause(self._num_pauses, time.monotonic())
        if self._state is ModelState.READY:
            self._go(ModelState.DRAINING)
        held = core.loop.pause(self._num_pauses, seconds)
        self._notify()
        await self.show_health()
        # A caller that leaves does not take the pause back: its bound ends it.
        await asyncio.shield(asyncio.wrap_future(held))

    async def end_pause(self, number: int) -> None:
        """Take new work again: the engine has ended this pause, which lasted for as long as it may."""
        if self._pause is not None and self._pause.number == number:
            self.resume()
            await self.show_health()

    def _step_again(self) -> None:
        """End the present pause, if there is one."""
        if self._pause is not None:
            self._pause = None
            if self._core is not None:
                self._core.loop.resume()
                self._notify()

    async def set_hung(self, hung: bool) -> None:
        """Refuse new work while a step of the engine hangs, and show it as health."""
        self._is_hung = hung
        await self.show_health()

    async def reload(self, grace: float | None) -> Reloaded:
        """Drain, read the weights again and resume, unless the process was drained before or is to be now.

        A caller that leaves does not end it. Raises FailedPrecondition: another one is under way, or the weights cannot
        be used; then the old ones stay.
        """
        core = self.loaded()
        if self._reload is not None or self._is_unloading:
            raise FailedPrecondition("another Reload, or an unload, is under way", reason="BUSY")
        self._reload = asyncio.create_task(self._run_reload(core, grace))
        # Its error is the caller's, who may be gone.
        self._reload.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._reload)

    def cancel_reload(self) -> None:
        """Cancel the Reload that is under way, if one is."""
        if self._reload is not None:
            self._reload.cancel()

    async def _run_reload(self, core: GenerationCore, grace: float | None) -> Reloaded:
        was_ready = self._state is ModelState.READY or self._pause is not None
        self.start_drain()
        self._resumes_after_reload = was_ready
        try:
            await self.show_health()
            aborted = await core.finish(grace)
            begin = time.monotonic()
            await core.reload()
            return Reloaded(time.monotonic() - begin, aborted)
        finally:
            self._reload = None
            if self._resumes_after_reload and not self._is_stopping:
                self.resume()
            await self.show_health()

    # The model, or the process, goes.

    def begin_unload(self) -> None:
        """Begin a drain after which the model goes."""
        self._is_unloading = True
        self.start_drain()

    def drop_core(self) -> None:
        """Drop the core of a model with an ended engine."""
        self._core = self._pause = None

    def end_unload(self) -> None:
        """Note that the unload is over, well or not."""
        self._is_unloading = False

    def become_empty(self) -> None:
        """Note that there is no model."""
        self._core = self._pause = None
        self._model_name, self._percent_loaded, self._load_stage = "", 0.0, ""
        self._is_hung = self._is_unloading = False
        self._go(ModelState.EMPTY)

    def stop(self) -> None:
        """Begin the drain of a process that stops."""
        self._is_stopping = True
        self.start_drain()

    def end(self) -> None:
        """Note that the process has failed, or is closing."""
        self._pause = None
        self._go(ModelState.UNAVAILABLE)

    # Others are told.

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Show health by `set_serving` from now on."""
        self._set_serving = set_serving

    async def show_health(self) -> None:
        """Show SERVING while new work is taken."""
        await self._set_serving(self._state is ModelState.READY and not self._is_hung)

    def _go(self, state: ModelState) -> None:
        """Change the state. A process that has ended stays so. Raises RuntimeError where there is no such way."""
        if self.has_ended:
            return
        if state not in _NEXT[self._state]:
            raise RuntimeError(f"a model that is {self._state.name} cannot become {state.name}")
        self._state = state

    def _notify(self) -> None:
        if self._core is not None:
            self._core.hub.notify()


def _no_model() -> Unavailable:
    """Make the error of a call that needs a model where there is none."""
    return Unavailable(
        "this process has no model: load one by ModelService.LoadModel (`penstock models load`), or send the request "
        "elsewhere",
        reason="NO_MODEL",
    )


async def _ignore(_: bool) -> None:
    """Ignore a change of health: no health service is bound."""
