"""VllmEngine over a generation service, so that gateways for vLLM (smg and others) route here (--vllm-engine)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc

from penstock import __version__
from penstock.common.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock.compat.vllm.engine_messages import AnswerWriter, renamed, to_generate
from penstock.compat.vllm.kv_events import KvEventLog, KvEventStream
from penstock.compat.vllm.tokenizer_archive import chunks_of, pack_tokenizer
from penstock.engines import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from penstock.generation.delivery.streams import RequestStream
from penstock.generation.lifecycle import Lifecycle, ModelState
from penstock.generation.metrics import GenerationMetrics
from penstock.generation.options.score_embed_commands import EmbedCommand
from penstock.generation.service import GenerationCore
from penstock.generation.wire.score_embed_messages import from_embeddings

VLLM_ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"
# Options of generation_config.json that vLLM tells its gateways.
_TOLD_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# As vLLM's own.
_SERVER_TYPE = "vllm-grpc"
Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """VllmEngine over one Lifecycle."""

    def __init__(self, lifecycle: Lifecycle, metrics: GenerationMetrics) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._started_at = time.monotonic()
        self._received_at = 0.0
        # Packed tokenizer of a load, by the load's number.
        self._archive: tuple[int, bytes] | None = None
        self._packing = asyncio.Lock()
        # Events of a load, by the load's number.
        self._events: tuple[int, KvEventStream] | None = None

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Send one request's tokens and ends."""
        self._received_at = time.time()
        try:
            core = self._lifecycle.accepting()
            options = to_generate(request, core.limits)
            remaining = context.time_remaining()
            maker = core.prepare(options, None if remaining is None else time.monotonic() + remaining)
            if core.takes_time(maker.request, options):
                await core.complete(maker.request, options)
                # It may have begun to drain meanwhile.
                self._lifecycle.accepting()
            stream = RequestStream(maker, core.config.max_pending_messages)
            core.hub.submit(maker.request, stream)
        except PenstockError as error:
            self._metrics.request_refused(error)
            raise renamed(error) from error
        writer = AnswerWriter(is_stream=request.stream)
        core.hub.attach(stream)
        try:
            async for message in stream.buffer:
                for told in writer.write(message):
                    await context.write(told)
        finally:
            core.hub.detach(stream)

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: Context) -> vllm_engine_pb2.EmbedResponse:
        """Return the mean of the final hidden states."""
        core = self._lifecycle.accepting()
        ids = list(request.tokenized.input_ids)
        if not ids:
            raise InvalidArgument("tokenized.input_ids", "must hold at least one token", reason="EMPTY_PROMPT")
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        results = await core.embed(EmbedCommand(inputs=[ids]), deadline, self._lifecycle.accepting)
        values = from_embeddings(results, normalize=False).embeddings[0].values
        return vllm_engine_pb2.EmbedResponse(embedding=values, prompt_tokens=len(ids), embedding_dim=len(values))

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Context) -> vllm_engine_pb2.AbortResponse:
        """End live requests; unknown ids are no error."""
        self._lifecycle.loaded().hub.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Tell whether new work is taken."""
        try:
            self._lifecycle.accepting()
        except PenstockError as error:
            return vllm_engine_pb2.HealthCheckResponse(healthy=False, message=error.message)
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="Health")

    async def FlushCache(
        self, request: smg_common_pb2.FlushCacheRequest, context: Context
    ) -> smg_common_pb2.FlushCacheResponse:
        """Forget every prefix that no running request holds; there is nothing to wait for."""
        try:
            blocks = await self._lifecycle.loaded().clear_cache()
        except FailedPrecondition as error:
            return smg_common_pb2.FlushCacheResponse(success=False, message=error.message)
        return smg_common_pb2.FlushCacheResponse(success=True, message=f"{blocks} blocks forgotten")

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Return the model's facts."""
        core = self._lifecycle.loaded()
        loaded, config = core.loaded, core.loaded.weights.model.config
        defaults = dict(loaded.files.defaults.options.items())
        told = (
            {name: defaults[name] for name in _TOLD_DEFAULTS if name in defaults} if defaults.get("do_sample") else {}
        )
        pad, bos = loaded.files.defaults.pad_token_id, loaded.files.defaults.bos_token_id
        context_tokens = loaded.served.max_context_tokens
        folder = str(loaded.files.tokenizer_folder or loaded.files.folder)
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(loaded.files.folder),
            tokenizer_path=folder,
            served_model_name=self._lifecycle.model_name,
            is_generation=True,
            max_context_length=context_tokens,
            max_req_input_len=context_tokens,
            vocab_size=config.vocab_size,
            model_type=config.model_type,
            architectures=[config.architecture],
            eos_token_ids=loaded.files.defaults.eos_token_ids,
            pad_token_id=pad or 0,
            bos_token_id=bos or 0,
            default_sampling_params_json=json.dumps(told, separators=(",", ":")) if told else "",
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Return the process's facts."""
        core = self._lifecycle.loaded()
        kv = core.loaded.pools.kv
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=core.hub.num_live,
            is_paused=self._lifecycle.state is ModelState.DRAINING,
            last_receive_timestamp=self._received_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=str(kv.dtype),
            block_size=kv.block_size,
            model_dtype=str(core.loaded.weights.model.dtype),
            max_num_seqs=core.loaded.engine.config.max_running_sequences,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the engine's load."""
        core = self._lifecycle.loaded()
        load, block = core.load, core.loaded.pools.kv.block_size
        # All layers keep a block of tokens in that many.
        bundle = core.loaded.engine.config.bundle_blocks
        window = core.loaded.engine.config.max_running_sequences
        speed = load.pace.tokens_per_second
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"penstock {__version__}",
            dp_rank_count=1,
            loads=[
                vllm_engine_pb2.SchedulerLoad(
                    num_running_reqs=load.running_requests,
                    num_waiting_reqs=load.waiting_requests,
                    num_total_reqs=load.running_requests + load.waiting_requests,
                    num_used_tokens=load.kv_blocks_used // bundle * block,
                    max_total_num_tokens=load.kv_blocks_total // bundle * block,
                    token_usage=load.kv_usage,
                    gen_throughput=speed if math.isfinite(speed) else 0.0,
                    cache_hit_rate=_share(core),
                    utilization=load.running_sequences / window,
                    max_running_requests=window,
                    num_waiting_uncached_tokens=load.pending_prompt_tokens,
                )
            ],
        )

    async def SubscribeKvEvents(
        self, request: smg_common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[smg_common_pb2.KvEventBatch]:
        """Send which blocks of the KV pool can be found from now on, and which cannot any more."""
        core = self._lifecycle.loaded()
        if not core.loaded.engine.config.prefix_cache:
            raise FailedPrecondition("there is no prefix cache (--no-prefix-cache)", reason="NO_PREFIX_CACHE")
        number = self._lifecycle.num_loads
        if self._events is None or self._events[0] != number:
            # Nothing is noted before somebody asks.
            log = KvEventLog(core.loaded.engine.config.block_size)
            self._events = number, KvEventStream(log, core.hub)
            # For those who come later, too: this caller may leave before the engine's thread gets to it.
            await asyncio.shield(asyncio.wrap_future(core.loop.run_on_engine(log.follow)))
        async with contextlib.aclosing(self._events[1].read(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch

    async def GetTokenizer(
        self, request: smg_common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[smg_common_pb2.GetTokenizerChunk]:
        """Send the tokenizer's files as a zip."""
        folder = self._lifecycle.loaded().loaded.files.tokenizer_folder
        if folder is None:
            raise FailedPrecondition("the tokenizer is not loaded (--no-load-tokenizer)", reason="NO_TOKENIZER")
        async with self._packing:
            # Once a load, by one thread: callers that come together wait for it.
            number = self._lifecycle.num_loads
            if self._archive is None or self._archive[0] != number:
                self._archive = number, await asyncio.to_thread(pack_tokenizer, folder)
            archive = self._archive[1]
        for chunk in chunks_of(archive):
            yield chunk


def _share(core: GenerationCore) -> float:
    """Share of looked-up prompt tokens that were in the prefix cache."""
    stats = core.stats
    return stats.prefix_hit_tokens / stats.prefix_lookup_tokens if stats.prefix_lookup_tokens else 0.0
