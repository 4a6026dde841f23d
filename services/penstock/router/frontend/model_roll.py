"""Rolling reload of a model: one backend after the other reads its weights anew while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.common.errors import FailedPrecondition
from penstock.common.logging import get_logger
from penstock.router.backends.backend import Backend
from penstock.router.frontend.catalogue import Catalogue, NoteStep
from penstock.router.frontend.forwarding import Context, Forwarding
from penstock.router.frontend.routed_model import RoutedModel
from penstock.v1 import admin_pb2, admin_pb2_grpc, router_pb2

# Longest wait for one change of a backend's state.
_LOOK_SECONDS = 1.0
# Address of a backend and the step that it takes now.
Step = tuple[str, router_pb2.RollStep.ValueType]
_log = get_logger("penstock.router")


class ModelRoll:
    """Rolls of the process, one at a time for each model. Belongs to one event loop."""

    def __init__(self, catalogue: Catalogue | None) -> None:
        """Make it. `catalogue`: of the models on demand, if there are some."""
        self._catalogue = catalogue
        self._rolling: dict[str, asyncio.Task[None]] = {}

    async def run(
        self, route: RoutedModel, model: str, grace_seconds: float | None, context: Context
    ) -> AsyncIterator[Step]:
        """Yield the steps as they begin. A caller that leaves does not stop the step under way.

        Raises FailedPrecondition: BUSY while the model is rolled already, ONE_BACKEND when nothing else could serve it
        meanwhile; and the backend's error, which ends the roll.
        """
        key = route.name or model
        if key in self._rolling:
            raise FailedPrecondition("model: it is being rolled already", reason="BUSY")
        steps: asyncio.Queue[Step | None] = asyncio.Queue()
        is_wanted = [True]

        def note(address: str, step: router_pb2.RollStep.ValueType) -> bool:
            """Tell a step; False when nobody wants the roll any more."""
            _log.info("model rolls", model=key, backend=address, step=router_pb2.RollStep.Name(step))
            steps.put_nowait((address, step))
            return is_wanted[0]

        task = asyncio.ensure_future(self._roll(route, model, grace_seconds, context, note))
        self._rolling[key] = task

        def end(_: asyncio.Task[None]) -> None:
            del self._rolling[key]
            steps.put_nowait(None)

        task.add_done_callback(end)
        try:
            while (step := await steps.get()) is not None:
                yield step
            await task
        finally:
            is_wanted[0] = False

    async def close(self) -> None:
        """End the rolls: the process stops."""
        tasks = list(self._rolling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _roll(
        self,
        route: RoutedModel,
        model: str,
        grace_seconds: float | None,
        context: Context,
        note: NoteStep,
    ) -> None:
        if route.residence is not None and self._catalogue is not None:
            await self._catalogue.roll(route.residence, grace_seconds, note)
            return
        request = admin_pb2.ReloadRequest(grace_seconds=grace_seconds)
        for backend in route.pool.ready(model):
            if len(route.pool.ready(model)) < 2:
                raise FailedPrecondition(
                    "model: it has one ready backend only: nothing would serve it meanwhile", reason="ONE_BACKEND"
                )
            note(backend.key, router_pb2.ROLL_STEP_LOADING)
            stub = admin_pb2_grpc.GenerationAdminServiceStub
            await Forwarding.call_at(backend, stub, "Reload", request, context)
            await _until_ready(route, backend)
            if not note(backend.key, router_pb2.ROLL_STEP_READY):
                return


async def _until_ready(route: RoutedModel, backend: Backend) -> None:
    """Return once a backend takes requests again, or is not of the model's any more."""
    while backend in route.pool.backends and not backend.link.is_ready:
        await route.pool.changed(_LOOK_SECONDS)
