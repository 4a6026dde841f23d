"""The way of new weights into a running model: one update at a time, bounded, and all of it or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from penstock.common.units import format_size
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.weight_tensor import TensorSpec
from penstock.generation.host.memory import host_memory
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.replace_weights import fixed_because
from penstock.generation.weights.new_tensors import NewTensors, WeightIntake, check_specs


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """Result of an update."""

    version: int
    num_bytes: int
    # Of making the new parts, beside live requests; and between two steps, while no request advanced.
    prepare_seconds: float
    pause_seconds: float


class WeightUpdates:
    """Updates of one model. Belongs to the event loop."""

    def __init__(
        self, config: GenerationServiceConfig, apply: Callable[[NewTensors, bool], Awaitable[AppliedUpdate]]
    ) -> None:
        """`apply` puts checked tensors into the running model, all of them or, where it raises, none; True: into its
        draft model."""
        self._config = config
        self._apply = apply
        self._is_busy = False
        # The update that is being applied, or the last one.
        self._work: asyncio.Future[AppliedUpdate] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other changes of the weights away, also until an update without a caller ends. Raises
        FailedPrecondition BUSY while a change is under way."""
        if self._is_busy:
            raise FailedPrecondition("another WriteWeights, or a Reload, is under way", reason="BUSY")
        self._is_busy = True
        try:
            yield
        finally:
            if self._work is None or self._work.done():
                self._is_busy = False
            else:
                self._work.add_done_callback(self._release)

    def is_of_draft(self, name: str, loaded: LoadedModel) -> bool:
        """True for the name of the draft model, unless the served model has it, too."""
        return loaded.engine.draft is not None and name == loaded.engine.draft.name != loaded.served.name

    def check(self, specs: Sequence[TensorSpec], loaded: LoadedModel, *, of_draft: bool = False) -> None:
        """Refuse an update before its bytes come.

        Raises FailedPrecondition WEIGHTS_FIXED, InvalidArgument naming a tensor's field, ResourceExhausted
        WEIGHTS_TOO_LARGE.
        """
        reason = fixed_because(self._config, loaded, of_draft=of_draft)
        if reason:
            raise FailedPrecondition(f"this model takes no new weights: {reason}", reason="WEIGHTS_FIXED")
        model = loaded.weights.draft if of_draft else loaded.weights.model
        assert model is not None, "the name of a draft model that is there"
        check_specs(specs, model.config)
        sent = sum(spec.num_bytes for spec in specs)
        # Of a matrix that makes keys and values of a latent there is a packed copy beside it.
        made = sent if model.config.latent is None else 2 * sent
        made = min(made, model.num_bytes)
        # A matrix lies whole beside what it becomes.
        self._check_room(sent, loaded, made + (sent if loaded.weights.device.compacts_weights else 0))

    def intake(self, specs: Sequence[TensorSpec], loaded: LoadedModel, *, of_draft: bool = False) -> WeightIntake:
        """Return the place for an update's bytes. Raises as `check`."""
        self.check(specs, loaded, of_draft=of_draft)
        return WeightIntake(specs)

    async def write(self, tensors: NewTensors, *, of_draft: bool = False) -> AppliedUpdate:
        """Put checked tensors into the running model; to be called `alone`. A caller that leaves does not end it.

        Raises what `apply` raises, and Unavailable ENGINE_STOPPED once it was cancelled.
        """
        self._work = work = asyncio.ensure_future(self._apply(tensors, of_draft))
        # Its error is the caller's, who may be gone.
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise Unavailable("the model is being closed", reason="ENGINE_STOPPED") from None
            raise

    def cancel(self) -> None:
        """Cancel an update under way: the model is being closed."""
        if self._work is not None:
            self._work.cancel()

    def _release(self, _: object) -> None:
        self._is_busy = False

    def _check_room(self, num_bytes: int, loaded: LoadedModel, parts: int) -> None:
        """Refuse tensors of `num_bytes`, and parts made of them with at most `parts` bytes, that do not fit."""
        most = self._config.write_weights_bytes()
        if most is not None and num_bytes > most:
            raise ResourceExhausted(
                f"the tensors have {format_size(num_bytes)}, and --max-write-weights-memory is {format_size(most)}",
                reason="WEIGHTS_TOO_LARGE",
            )
        # Parts are made while the old ones are still there.
        on_device = loaded.weights.device.memory().available
        _, on_host = host_memory()
        is_one = loaded.weights.device.torch_device.type == "cpu"
        if num_bytes + (parts if is_one else 0) > on_host or parts > on_device:
            raise ResourceExhausted(
                f"the tensors have {format_size(num_bytes)}, and memory for them and the parts made of them is short: "
                "send fewer at once",
                reason="WEIGHTS_TOO_LARGE",
            )
