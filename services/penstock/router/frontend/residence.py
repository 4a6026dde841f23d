"""Residence of a model on demand: cold, on its way into a slot, or there. Requests wait here while it comes."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.common.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unavailable
from penstock.router.backends.model_slot import ModelSlot
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.models_file import ModelEntry


class ResidenceState(enum.Enum):
    """State of a model on demand. LEAVING: its requests finish, new ones wait for the next load."""

    COLD = 1
    LOADING = 2
    LOADED = 3
    LEAVING = 4


class Residence:
    """Residence of one model. Belongs to one event loop."""

    def __init__(
        self,
        entry: ModelEntry,
        pool: BackendPool,
        admission: Admission,
        config: RouterConfig,
        bring: Callable[[Residence], Coroutine[Any, Any, PenstockError | None]],
    ) -> None:
        """Make it, cold. `bring` loads the model and returns the error of a load that failed."""
        self.entry = entry
        self.pool = pool
        self.admission = admission
        self.state = ResidenceState.COLD
        # Part of the weights that are read, in percent.
        self.percent = 0.0
        self.slot: ModelSlot | None = None
        # True while it is loaded into a second slot, to leave the first.
        self.is_rolling = False
        # time.monotonic() of the last request, and of the end of the last load.
        self.last_used = self.loaded_at = time.monotonic()
        # That of the last request that uses more than idle capacity; 0: there was none.
        self.last_pressed = 0.0
        # That since which it is loaded, but its slot does not answer; None: it does.
        self.lost_at: float | None = None
        # Not set while it leaves its slot.
        self.has_left = asyncio.Event()
        self.has_left.set()
        self._max_waiting = config.max_model_waiting
        self._retry_after_seconds = config.retry_after_seconds
        self._bring = bring
        self._coming: asyncio.Task[PenstockError | None] | None = None
        self._waiting = 0
        # True once such a request waits for the load under way.
        self._is_load_pressing = False
        self._is_draining = False

    @property
    def is_idle(self) -> bool:
        """True while no request needs the model."""
        return not (self._waiting or self.admission.live or self.admission.waiting)

    @property
    def is_pressing(self) -> bool:
        """True while an operator, or a request that uses more than idle capacity, needs the model."""
        return self.is_rolling or self._is_load_pressing or self.admission.pressing > 0

    async def require(self, left: float | None, *, is_idle_only: bool = False) -> None:
        """Return once the model is there. `left`: seconds to the deadline; None: there is none.

        `is_idle_only`: no model that is in use leaves for this request's sake.
        The caller takes its place from admission in the same turn of the loop, or the model may leave again.
        Raises ResourceExhausted when too many wait already, DeadlineExceeded, Unavailable while the router drains, and
        the error of a load that failed.
        """
        self.last_used = time.monotonic()
        if not is_idle_only:
            self.last_pressed = self.last_used
        while self.state is not ResidenceState.LOADED:
            if self._is_draining:
                raise Unavailable(
                    "the router is draining", reason="DRAINING", retry_after_seconds=self._retry_after_seconds
                )
            if self._waiting >= self._max_waiting:
                raise ResourceExhausted(
                    f"more than {self._max_waiting} requests wait for this model to be loaded",
                    reason="QUEUE_FULL",
                    retry_after_seconds=self._retry_after_seconds,
                )
            until = None if left is None else time.monotonic() + left
            await self._wait(left, is_idle_only=is_idle_only)
            left = None if until is None else until - time.monotonic()

    async def _wait(self, left: float | None, *, is_idle_only: bool) -> None:
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._bring(self))
            self._coming.add_done_callback(self._has_come)
        coming = self._coming
        self._is_load_pressing |= not is_idle_only
        self._waiting += 1
        try:
            # Others wait for it, too: a request that leaves does not end the load.
            done, _ = await asyncio.wait({coming}, timeout=None if left is None else max(left, 0.0))
        finally:
            self._waiting -= 1
        if not done:
            raise DeadlineExceeded("the deadline passed while the model was loaded", reason="DEADLINE_EXCEEDED")
        if coming.cancelled():
            raise Unavailable("the model is not loaded any more", reason="NO_BACKEND", retry_after_seconds=1.0)
        if (error := coming.result()) is not None:
            raise error

    def _has_come(self, _: asyncio.Task[PenstockError | None]) -> None:
        self._coming = None
        self._is_load_pressing = False

    def drain(self) -> None:
        """Let nothing wait any more: the router stops, or the model is gone from the file."""
        self._is_draining = True
        if self._coming is not None:
            self._coming.cancel()

    async def end_load(self) -> None:
        """Return once no load is under way."""
        if self._coming is not None:
            await asyncio.wait({self._coming})
