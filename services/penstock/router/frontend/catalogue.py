"""Catalogue of models on demand: they share slots and memory; the least recently used leaves for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.common.errors import (
    FailedPrecondition,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.common.logging import get_logger
from penstock.router.backends.model_slot import ModelSlot
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.frontend.residence import Residence, ResidenceState
from penstock.router.metrics import RouterMetrics
from penstock.router.models_file import ModelEntry, ModelsFile
from penstock.v1 import router_pb2

# Longest wait for a change that is told by no event, such as the end of a stream.
_LOOK_SECONDS = 0.2
# Seconds after which a model leaves a slot that does not answer: it may be loaded into another one.
_LOST_SECONDS = 5.0
# Called with a slot's address and the step that it takes.
NoteStep = Callable[[str, router_pb2.RollStep.ValueType], bool]
_log = get_logger("penstock.router")


class Catalogue:
    """Models on demand of one file. Belongs to one event loop."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._slots: list[ModelSlot] = []
        self._memory = 0
        self._residences: list[Residence] = []
        # Who has a slot, be it on the way in or out; a model that rolls has two.
        self._holders: dict[ModelSlot, Residence] = {}
        # One at a time looks for a slot, in the order in which they came.
        self._choosing = asyncio.Lock()
        self._has_looked = asyncio.Event()

    def use(self, file: ModelsFile) -> None:
        """Take the slots and the memory of the file that the process starts with."""
        self._slots = [ModelSlot(address, self._config) for address in file.slots]
        self._memory = file.memory

    def add(self, entry: ModelEntry, pool: BackendPool, admission: Admission) -> Residence:
        """Add a model, cold."""
        residence = Residence(entry, pool, admission, self._config, self._bring)
        self._residences.append(residence)
        return residence

    async def remove(self, residence: Residence) -> None:
        """Forget a model that has no requests any more, and free its slot."""
        self._residences.remove(residence)
        while residence.is_rolling:
            # Only the roll knows both of its slots.
            await residence.pool.changed(_LOOK_SECONDS)
        await residence.end_load()
        if residence.state is ResidenceState.LOADED:
            await self._leave(residence, "removed")

    async def run(self) -> None:
        """Take over what slots have, then unload what is idle and notice what is gone, until cancelled."""
        for slot in self._slots:
            await self._take_over(slot)
        self._has_looked.set()
        while True:
            await asyncio.sleep(min(1.0, max(_LOOK_SECONDS, self._config.model_idle_seconds / 4)))
            now = time.monotonic()
            for residence in list(self._residences):
                if residence.state is not ResidenceState.LOADED or residence.is_rolling:
                    continue
                if residence.is_pressing:
                    residence.last_pressed = now
                if residence.pool.ready():
                    residence.lost_at = None
                if not residence.is_idle:
                    residence.last_used = now
                elif not residence.pool.ready():
                    await self._look_for(residence)
                elif self._config.model_idle_seconds and now - residence.last_used > self._config.model_idle_seconds:
                    await self._leave(residence, "idle")

    async def roll(self, residence: Residence, grace_seconds: float | None, note: NoteStep) -> None:
        """Load the model into another slot, let the old one's streams end there, and unload it.

        `note` is told each step with the slot's address. Raises FailedPrecondition ONE_BACKEND where there is no second
        slot or not the memory, and the slot's PenstockError: then the model is served as before.
        """
        needs = 2 * residence.entry.memory
        if len(self._slots) < 2 or (self._memory and needs > self._memory):
            raise FailedPrecondition(
                "model: a roll needs a second slot, and memory for the model twice", reason="ONE_BACKEND"
            )
        residence.is_rolling = True
        try:
            await residence.require(None)
            old = residence.slot
            assert old is not None
            await self._replace(residence, old, await self._take_slot(residence), note)
            try:
                await self._until_gone(residence.pool, old.address)
                await old.unload(self._config.drain_grace_seconds if grace_seconds is None else grace_seconds)
            finally:
                # Whatever is left there goes before the next load.
                del self._holders[old]
            self._metrics.model_unloads(residence.entry.name, "roll").inc()
            note(old.address, router_pb2.ROLL_STEP_UNLOADED)
        finally:
            residence.is_rolling = False

    async def _replace(self, residence: Residence, old: ModelSlot, new: ModelSlot, note: NoteStep) -> None:
        """Serve the model from another slot; from the old one where that fails."""
        try:
            note(new.address, router_pb2.ROLL_STEP_LOADING)
            await self._load(residence, new)
            residence.pool.follow((new.address,))
            await self._until_ready(residence, new.address)
        except BaseException:
            residence.pool.follow((old.address,))
            del self._holders[new]
            raise
        residence.slot = new
        note(new.address, router_pb2.ROLL_STEP_READY)

    async def _bring(self, residence: Residence) -> PenstockError | None:
        """Load a model into a slot; return the error."""
        name = residence.entry.name
        try:
            await self._has_looked.wait()
            await residence.has_left.wait()
            if residence.state is ResidenceState.LOADED:
                return None
            residence.state, residence.percent = ResidenceState.LOADING, 0.0
            await self._move_in(residence, await self._loaded_slot(residence))
            return None
        except PenstockError as error:
            if residence.is_pressing:
                # Requests of idle capacity come again and again.
                _log.warning("model not loaded", model=name, reason=error.reason)
            return _as_seen(error)
        finally:
            if residence.state is ResidenceState.LOADING:
                residence.state = ResidenceState.COLD

    async def _loaded_slot(self, residence: Residence) -> ModelSlot:
        """Load a model into a slot, passing over those that do not answer; return the slot."""
        while True:
            slot = await self._take_slot(residence)
            try:
                await self._load(residence, slot)
            except BaseException as error:
                del self._holders[slot]
                # One that was lost during the load is not passed over: the model might end the others, too.
                if isinstance(error, PenstockError) and slot.is_away:
                    continue
                raise
            return slot

    async def _load(self, residence: Residence, slot: ModelSlot) -> None:
        name, began = residence.entry.name, time.monotonic()

        def note(percent: float) -> None:
            residence.percent = percent

        try:
            async with asyncio.timeout(self._config.model_load_seconds):
                # An unload that was cut off, or somebody else, left one there.
                if await slot.loaded_name():
                    await slot.unload(self._config.drain_grace_seconds)
                await slot.load(residence.entry, note)
        except TimeoutError:
            self._metrics.model_loads(name, "failed").inc()
            raise Unavailable("the model was not loaded in time", reason="NO_BACKEND") from None
        except PenstockError:
            self._metrics.model_loads(name, "failed").inc()
            raise
        self._metrics.model_loads(name, "ok").inc()
        self._metrics.model_load_seconds.observe(time.monotonic() - began)
        _log.info("model loaded", model=name, slot=slot.address, seconds=round(time.monotonic() - began, 3))

    async def _take_slot(self, residence: Residence) -> ModelSlot:
        """Return a slot with the memory that the model needs; others leave for it. It is the model's from now on."""
        until = time.monotonic() + self._config.model_load_seconds
        async with self._choosing:
            while True:
                free = next((one for one in self._slots if one not in self._holders and not one.is_away), None)
                if free is not None and self._has_memory(residence):
                    self._holders[free] = residence
                    return free
                victim = self._victim(residence)
                if victim is not None:
                    await self._leave(victim, "room")
                elif all(slot.is_away for slot in self._slots):
                    raise Unavailable(
                        "no slot for models on demand answers",
                        reason="NO_BACKEND",
                        retry_after_seconds=self._config.retry_after_seconds,
                    )
                elif not residence.is_pressing or time.monotonic() > until:
                    # Requests of idle capacity wait for no slot: another model's may come before it is free.
                    raise ResourceExhausted(
                        "other models are in use in every slot",
                        reason="MODEL_SLOTS_FULL",
                        retry_after_seconds=self._config.retry_after_seconds,
                    )
                else:
                    await asyncio.sleep(_LOOK_SECONDS)

    def _has_memory(self, residence: Residence) -> bool:
        held = sum(holder.entry.memory for holder in self._holders.values())
        return not self._memory or held + residence.entry.memory <= self._memory

    def _victim(self, asking: Residence) -> Residence | None:
        """Choose who leaves: of the idle ones that was used least recently, else of those that nobody presses for, else
        of those that have had their turn. For a model that nobody presses for, only an idle one that has had it.
        """
        loaded = [one for one in self._residences if one.state is ResidenceState.LOADED]
        there = [one for one in loaded if not one.is_rolling and one is not asking]
        idle = [one for one in there if one.is_idle]
        had_turn = time.monotonic() - self._config.model_turn_seconds
        if not asking.is_pressing:
            able = [one for one in idle if max(one.loaded_at, one.last_pressed) < had_turn]
        else:
            able = (
                idle
                or [one for one in there if not one.is_pressing]
                or [one for one in there if one.loaded_at < had_turn]
            )
        return min(able, key=lambda one: one.last_used, default=None)

    async def _leave(self, residence: Residence, cause: str) -> None:
        """Let a model's requests end, and free its slot. Its next requests wait for its next load."""
        slot = residence.slot
        assert slot is not None
        residence.state = ResidenceState.LEAVING
        residence.has_left.clear()
        try:
            # No stream is lost for another model's sake: they are as long as they are.
            await residence.admission.wait_until_empty()
        except asyncio.CancelledError:
            # Who needed the slot is gone, and this model has it still.
            residence.state = ResidenceState.LOADED
            residence.has_left.set()
            raise
        try:
            residence.pool.follow(())
            await self._until_gone(residence.pool, slot.address)
            await slot.unload(self._config.drain_grace_seconds)
        except PenstockError as error:
            _log.warning("model not unloaded", model=residence.entry.name, slot=slot.address, reason=error.reason)
        finally:
            residence.slot, residence.state = None, ResidenceState.COLD
            residence.has_left.set()
            del self._holders[slot]
            self._metrics.model_loaded(residence.entry.name).set(0)
        self._metrics.model_unloads(residence.entry.name, cause).inc()
        _log.info("model unloaded", model=residence.entry.name, slot=slot.address, cause=cause)

    async def _take_over(self, slot: ModelSlot) -> None:
        """Use what a slot has: another router, or this one before its restart, loaded it."""
        try:
            name = await slot.loaded_name()
            residence = next((one for one in self._residences if one.entry.name == name and one.slot is None), None)
            if residence is not None:
                await self._move_in(residence, slot)
            elif name:
                await slot.unload(self._config.drain_grace_seconds)
        except PenstockError as error:
            _log.warning("slot does not answer", slot=slot.address, reason=error.reason)

    async def _move_in(self, residence: Residence, slot: ModelSlot) -> None:
        """Serve a model from the slot that has it. Raises PenstockError where it does not serve."""
        self._holders[slot] = residence
        residence.state = ResidenceState.LOADING
        residence.pool.follow((slot.address,))
        try:
            await self._until_ready(residence, slot.address)
        except BaseException:
            residence.state = ResidenceState.COLD
            residence.pool.follow(())
            del self._holders[slot]
            raise
        residence.slot, residence.state = slot, ResidenceState.LOADED
        residence.loaded_at = residence.last_used = time.monotonic()
        self._metrics.model_loaded(residence.entry.name).set(1)

    async def _look_for(self, residence: Residence) -> None:
        """Note that a model is gone if its slot does not have it any more, or has not answered for long."""
        slot = residence.slot
        assert slot is not None
        try:
            is_there = await slot.loaded_name() == residence.entry.name
            residence.lost_at = None
        except PenstockError:
            now = time.monotonic()
            if residence.lost_at is None:
                residence.lost_at = now
            is_there = now - residence.lost_at < _LOST_SECONDS
        if not is_there and residence.state is ResidenceState.LOADED:
            residence.pool.follow(())
            residence.slot, residence.state = None, ResidenceState.COLD
            del self._holders[slot]
            self._metrics.model_loaded(residence.entry.name).set(0)
            _log.warning("model is gone from its slot", model=residence.entry.name, slot=slot.address)

    async def _until_ready(self, residence: Residence, address: str) -> None:
        until = time.monotonic() + self._config.start_timeout_seconds
        while not any(backend.key == address for backend in residence.pool.ready()):
            left = until - time.monotonic()
            if residence.pool.only_mismatches() or left <= 0:
                raise (
                    FailedPrecondition(
                        "the tokenizer is not the one that the model was made for", reason="TOKENIZER_MISMATCH"
                    )
                    if left > 0
                    else Unavailable("the model does not serve in time", reason="NO_BACKEND")
                )
            await residence.pool.changed(min(left, _LOOK_SECONDS))

    async def _until_gone(self, pool: BackendPool, address: str) -> None:
        while any(backend.key == address for backend in pool.backends):
            await pool.changed(_LOOK_SECONDS)


def _as_seen(error: PenstockError) -> PenstockError:
    """Return a failed load's error as clients may see it: the slot's paths and flags are for operators."""
    if isinstance(error, ResourceExhausted | Unavailable):
        return type(error)(
            "the model cannot be loaded now", reason=error.reason, retry_after_seconds=error.retry_after_seconds
        )
    return FailedPrecondition("the model cannot be loaded", reason=error.reason)
