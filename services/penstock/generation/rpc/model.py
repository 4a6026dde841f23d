"""ModelService: facts about the served model, its device and its limits; the model loaded and unloaded."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.common.progress import StageProgress
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.config import EngineConfig
from penstock.generation.graphs.model_access import ModelAccess
from penstock.generation.holder.model_holder import ModelHolder
from penstock.generation.holder.model_load import ModelLoad
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.options.validate import check_model
from penstock.generation.rpc.graph_calls import GraphCalls
from penstock.generation.service import GenerationCore
from penstock.generation.startup.replace_weights import fixed_because
from penstock.generation.wire import convert, load_model, weight_messages
from penstock.generation.wire.dtype_messages import from_dtype
from penstock.generation.wire.graph_messages import from_graph
from penstock.generation.wire.option_messages import from_options
from penstock.v1 import common_pb2, config_pb2, model_pb2

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(GraphCalls):
    """ModelService over one Lifecycle and its ModelHolder."""

    def __init__(self, lifecycle: Lifecycle, holder: ModelHolder, config: GenerationServiceConfig) -> None:
        super().__init__(lifecycle)
        self._holder = holder
        self._config = config
        self._max_message_bytes = config.max_message_bytes
        # The graphs of an opened model as bytes: a large model has hundreds, which take milliseconds to describe.
        self._listed: tuple[weakref.ref[ModelAccess], bytes] | None = None

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        """Return the facts; while the model loads only its name, state and percentage."""
        check_model(request.model, self._lifecycle.model_name)
        return self._info()

    async def LoadModel(  # type: ignore[override]
        self, request_iterator: AsyncIterator[model_pb2.LoadModelRequest], context: Context
    ) -> None:
        """Load a model from a path or from the stream's bytes: send progress, and finally the facts."""
        messages = aiter(request_iterator)
        first = await self._next(messages)
        # Not before: a client that is still writing may lose the status.
        self._require_access()
        if first is None:
            raise InvalidArgument("start", "must come first")
        load = self._holder.begin_load(load_model.to_order(first))
        shown = _NewestProgress()
        writer = asyncio.create_task(shown.write(context))
        try:
            await self._receive(messages, load, shown)
            await load.finish(shown.show)
        except BaseException:
            writer.cancel()
            raise
        finally:
            # A caller that has left hears nothing, but everything is freed.
            await load.end()
        shown.end()
        await writer
        await context.write(model_pb2.LoadModelResponse(info=self._info()))

    async def WriteWeights(  # type: ignore[override]
        self, request_iterator: AsyncIterator[model_pb2.WriteWeightsRequest], context: Context
    ) -> None:
        """Write new weights into the running model: answer every message, and finally with the new version."""
        messages = aiter(request_iterator)
        first = await self._next(messages)
        # As of LoadModel: not before a message has come.
        self._require_access()
        if not self._config.write_weights:
            raise FailedPrecondition(
                "nobody may write weights into this process: --write-weights allows it", reason="WRITE_WEIGHTS_OFF"
            )
        if first is None:
            raise InvalidArgument("start", "must come first")
        specs = weight_messages.to_specs(first)
        # A drained process takes them, too: a trainer may drain it first.
        core = self._lifecycle.loaded()
        of_draft = core.updates.is_of_draft(first.start.model, core.loaded)
        if not of_draft:
            check_model(first.start.model, self._lifecycle.model_name)
        with core.updates.alone():
            intake = core.updates.intake(specs, core.loaded, of_draft=of_draft)
            await context.write(model_pb2.WriteWeightsResponse(received_bytes=0))
            while intake.wants_bytes:
                message = await self._next(messages)
                if message is None:
                    raise intake.cut_short()
                intake.take(weight_messages.to_bytes(message))
                await context.write(model_pb2.WriteWeightsResponse(received_bytes=intake.received))
            if await self._next(messages) is not None:
                raise InvalidArgument("chunk", f"must end with the tensors, after {intake.num_bytes} bytes in all")
            written = await core.updates.write(intake.tensors(), of_draft=of_draft)
        await context.write(
            model_pb2.WriteWeightsResponse(
                written=model_pb2.WeightsWritten(
                    weights_version=written.version,
                    num_bytes=written.num_bytes,
                    prepare_seconds=written.prepare_seconds,
                    pause_seconds=written.pause_seconds,
                )
            )
        )

    async def UnloadModel(
        self, request: model_pb2.UnloadModelRequest, context: Context
    ) -> model_pb2.UnloadModelResponse:
        """End the model; the process is then without one."""
        self._require_access()
        gone = await self._holder.unload(load_model.to_grace(request))
        return model_pb2.UnloadModelResponse(
            model=gone.name, resident_bytes_before=gone.bytes_before, resident_bytes_after=gone.bytes_after
        )

    async def _receive(
        self, messages: AsyncIterator[model_pb2.LoadModelRequest], load: ModelLoad, shown: _NewestProgress
    ) -> None:
        """Take the bytes of all files. Progress answers every message: a sender may wait for it, so that no refusal
        meets a message that is being sent."""
        if load.wants_bytes:
            shown.show(load.received)
        while load.wants_bytes:
            message = await self._next(messages)
            if message is None:
                load.cut_short()
                return
            await load.take(*load_model.to_chunk(message))
            shown.show(load.received)

    async def _next(self, messages: AsyncIterator[T]) -> T | None:
        """Return the next message; None at the end. Raises InvalidArgument when it does not come."""
        most = self._config.receive_idle_seconds
        try:
            async with asyncio.timeout(most):
                return await anext(messages, None)
        except TimeoutError:
            raise InvalidArgument(
                "chunk", f"did not come within {most:g} s (--receive-idle-seconds)", reason="MODEL_REFUSED"
            ) from None

    def _require_access(self) -> None:
        if not self._config.is_model_open:
            raise FailedPrecondition(
                "nobody may load or unload a model in this process: --model-access local allows it on a loopback "
                "address, all on any address with --model-access-token-file",
                reason="MODEL_ACCESS_OFF",
            )

    def _info(self) -> model_pb2.GetModelInfoResponse:
        lifecycle = self._lifecycle
        response = model_pb2.GetModelInfoResponse(
            model=lifecycle.model_name,
            state=convert.from_state(lifecycle.state.value),
            percent_loaded=lifecycle.percent_loaded,
            load_number=lifecycle.num_loads,
            load_stage=lifecycle.load_stage,
            can_load=self._config.is_model_open,
            aliases=lifecycle.aliases,
            takes_session_commands=True,
        )
        if lifecycle.core is not None:
            response.MergeFrom(self._describe(lifecycle.core))
            response.weights_version = lifecycle.core.weights_version
            response.can_write_weights = self._can_write(lifecycle.core)
            if lifecycle.core.access is not None:
                response.MergeFromString(self._graphs(lifecycle.core.access))
        return response

    def _describe(self, core: GenerationCore) -> model_pb2.GetModelInfoResponse:
        loaded = core.loaded
        config, defaults = loaded.weights.model.config, loaded.files.defaults
        return model_pb2.GetModelInfoResponse(
            architecture=config.architecture,
            model_type=config.model_type,
            model_route=config.route,
            model_route_reason=config.route_reason,
            dtype=from_dtype(str(loaded.weights.model.dtype)),
            devices=[loaded.weights.device.describe()],
            world_size=self._config.tensor_parallel,
            kv=_geometry(core),
            limits=self._limits(core),
            eos_token_ids=defaults.eos_token_ids,
            bos_token_id=_first(defaults.bos_token_id, config.bos_token_id),
            pad_token_id=_first(defaults.pad_token_id, config.pad_token_id),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_parameters=config.num_parameters,
            checkpoint_format=config.checkpoint_format,
            weight_forms=dict(config.weight_forms),
            tokenizer_fingerprint=loaded.served.tokenizer_fingerprint,
            assistant_model=loaded.served.assistant_model,
            adapters=loaded.weights.adapters.names(),
            default_config=from_options(defaults.options),
            default_stop=config_pb2.StopConfig(
                stop_strings=defaults.stop_strings,
                stop_token_ids=[common_pb2.TokenIds(ids=ids) for ids in defaults.eos_sequences],
            ),
        )

    def _can_write(self, core: GenerationCore) -> bool:
        is_allowed = self._config.is_model_open and self._config.write_weights
        return is_allowed and not fixed_because(core.config, core.loaded)

    def _graphs(self, access: ModelAccess) -> bytes:
        if self._listed is None or self._listed[0]() is not access:
            graphs = [from_graph(graph, can_keep=access.can_keep_tensors) for graph in access.graphs.every]
            # Weakly: it has the model, which may be replaced before anybody asks again.
            listed = model_pb2.GetModelInfoResponse(forward_graphs=graphs).SerializeToString()
            self._listed = weakref.ref(access), listed
        return self._listed[1]

    def _limits(self, core: GenerationCore) -> model_pb2.Limits:
        engine, limits = core.loaded.engine.config, core.limits
        return model_pb2.Limits(
            max_context_tokens=core.loaded.served.max_context_tokens,
            max_queued_requests=engine.max_queued_requests,
            max_running_sequences=engine.max_running_sequences,
            max_batch_tokens=engine.max_batch_tokens,
            max_return_sequences=limits.max_return_sequences,
            max_top_logprobs=limits.max_top_logprobs,
            max_stop_strings=limits.max_stop_strings,
            max_logit_bias=limits.max_logit_bias,
            max_message_bytes=self._max_message_bytes,
        )


class _NewestProgress:
    """Progress on its way to a caller: when states come faster than they are read, the newest is sent."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The newest state of each stage, in order; stages are a handful.
        self._states: dict[str, StageProgress] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def show(self, progress: StageProgress) -> None:
        """Show it. Thread-safe."""
        try:
            self._loop.call_soon_threadsafe(self._put, progress)
        except RuntimeError:
            # The event loop is closed: no caller is left.
            return

    def end(self) -> None:
        """Let `write` return after everything is sent."""
        self._ended = True
        self._changed.set()

    async def write(self, context: Context) -> None:
        """Write until the end."""
        while not self._ended or self._states:
            await self._changed.wait()
            self._changed.clear()
            while self._states:
                await context.write(load_model.from_progress(self._states.pop(next(iter(self._states)))))

    def _put(self, progress: StageProgress) -> None:
        self._states[progress.stage] = progress
        self._changed.set()


def _geometry(core: GenerationCore) -> model_pb2.KvGeometry:
    kv = core.loaded.pools.kv
    return model_pb2.KvGeometry(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        num_layers=kv.num_layers if kv.layout is None else len(kv.layout.places),
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        dtype=from_dtype(str(kv.dtype)),
        bytes_per_block=kv.bytes_per_block,
        total_bytes=kv.num_bytes,
        num_states=0 if kv.states is None else kv.states.num_slots,
        bytes_per_state=0 if kv.states is None else kv.states.bytes_per_slot,
        num_state_snapshots=0 if kv.states is None else kv.states.num_snapshots,
        prefix_cache=core.loaded.engine.config.prefix_cache,
        groups=_kv_groups(core.loaded.engine.config, kv),
    )


def _kv_groups(config: EngineConfig, kv: KVCachePool) -> list[model_pb2.KvGroup]:
    layers = [kv.num_layers] if kv.layout is None else [len(members) for members in kv.layout.members]
    return [
        model_pb2.KvGroup(
            num_layers=count,
            num_blocks=group.num_blocks,
            window=group.window,
            chunk=group.chunk,
            bytes_per_token=group.num_blocks * kv.bytes_per_block // kv.block_size,
        )
        for group, count in zip(config.block_groups, layers, strict=True)
    ]


def _first(ours: int | None, theirs: int | None) -> int | None:
    return theirs if ours is None else ours
