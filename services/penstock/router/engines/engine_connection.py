"""Connection to another engine: its own health, facts and load, by polling, in the terms of the router."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.errors import InvalidArgument, PenstockError, Unavailable
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.engines import smg_common_pb2
from penstock.router.config import RouterConfig
from penstock.router.engines.engine_blocks import NAMED_TOKENS, EngineBlocks
from penstock.router.engines.engine_calls import EngineCalls
from penstock.router.engines.engine_codec import EngineCodec
from penstock.router.engines.engine_model import EngineModel, read_model
from penstock.router.engines.engine_request import lacking, resolve_request
from penstock.router.engines.engine_session import EngineSession
from penstock.router.engines.tokenizer_bundle import BundleFacts, read_bundle
from penstock.serving.transport import Channel, StreamCall
from penstock.v1 import admin_pb2, common_pb2, generation_pb2, model_pb2

# Answers of an engine that does not send its tokenizer's files.
_NO_FILES = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
# Answers of an engine without the standard health service, or with one that does not know its protocol.
_NO_HEALTH = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
# Answers of an engine that tells nothing of its cache: an older one, or one that was not started for it.
_NO_EVENTS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
# Blocks in which a share of memory is told.
_BLOCKS = 1000
_log = get_logger("penstock.router")


class EngineConnection:
    """Connection to another engine. Implements BackendConnection."""

    def __init__(self, channel: Channel, config: RouterConfig, codec: EngineCodec, target: str) -> None:
        """Make it. `target` is the configured name of the backend, for errors."""
        self._channel = channel
        self._config = config
        self._codec = codec
        self._target = target
        self._stub = codec.make_stub(channel.for_stubs)
        self._health = health_pb2_grpc.HealthStub(channel.for_stubs)
        self._model: EngineModel | None = None
        self._session: EngineSession | None = None
        # What it tells of its cached blocks; None: it is not asked.
        self._blocks: EngineBlocks | None = None
        suffix, numbers = secrets.token_hex(4), itertools.count()
        self.calls = EngineCalls(
            codec, self._stub, lambda: self._require_model(), lambda: f"call-{suffix}-{next(numbers)}"
        )

    async def until_serving(self, on_starting: Callable[[], object]) -> bool:
        async with contextlib.aclosing(self.watch_health()) as updates:
            async for is_serving in updates:
                if is_serving:
                    return True
                on_starting()
        return False

    async def model_info(self) -> model_pb2.GetModelInfoResponse:
        messages = self._codec.messages
        told = await self._ask(self._stub.GetModelInfo, messages.GetModelInfoRequest())
        server = await self._ask(self._stub.GetServerInfo, messages.GetServerInfoRequest())
        loads = await self._ask(self._stub.GetLoads, messages.GetLoadsRequest())
        kv_tokens = sum(max(load.max_total_num_tokens, 0) for load in loads.loads)
        self._model = read_model(
            told, await self._bundle(told), self._codec.window(server), kv_tokens, self._codec.max_top_logprobs
        )
        if self._config.prefix_reports:
            self._blocks = EngineBlocks(NAMED_TOKENS, self._config.max_known_blocks)
        # No engine tells whether its cache is on.
        _log.warning(
            "the engine's prefix cache, if it is on, is shared by all tenants and values of cache_salt: its protocol "
            "has no field for them. Where timing must not tell one tenant what another asked, switch it off there",
            backend=self._target,
            engine=self._codec.name,
        )
        return self._model.info

    async def open_session(self) -> StreamCall[generation_pb2.SessionResponse]:
        self._session = EngineSession(
            self._channel, self._codec, self._require_model(), self._send_aborts, self._config.engine_silence_seconds
        )
        return self._session

    async def watch_loads(self) -> AsyncGenerator[admin_pb2.WatchLoadResponse]:
        blocks, following = self._blocks, None
        if blocks is not None:
            # Beside the reports of load: they go on while it fails, and routing goes by estimates.
            follow = kept_running(
                lambda: self._follow_blocks(blocks), _log, "cache events", self._config.reconnect_max_seconds
            )
            following = asyncio.create_task(follow)
        try:
            async with contextlib.aclosing(self._loads()) as loads:
                async for load in loads:
                    changes = blocks.changes() if blocks is not None else None
                    yield admin_pb2.WatchLoadResponse(load=load, prefixes=changes)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _loads(self) -> AsyncGenerator[admin_pb2.Load]:
        request = self._codec.messages.GetLoadsRequest()
        while True:
            told = await self._ask(self._stub.GetLoads, request)
            loads = list(told.loads)
            usage = max((load.token_usage for load in loads), default=0.0)
            ours = self._session.num_calls if self._session is not None else 0
            yield admin_pb2.Load(
                # An engine without statistics tells of nothing.
                running_requests=max(sum(max(load.num_running_reqs, 0) for load in loads), ours),
                waiting_requests=sum(max(load.num_waiting_reqs, 0) for load in loads),
                kv_blocks_total=_BLOCKS,
                kv_blocks_used=int(min(max(usage, 0.0), 1.0) * _BLOCKS) if usage == usage else 0,
                # It answers: so it gets on, as far as anyone can tell.
                step_seconds=0.0,
                state=common_pb2.MODEL_STATE_READY,
            )
            await asyncio.sleep(self._poll_seconds)

    async def _follow_blocks(self, blocks: EngineBlocks) -> None:
        """Take the events of the engine's cache while it tells them. What it told before a loss does not count."""
        while True:
            events = self._stub.SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest())
            blocks.begin()
            try:
                async for batch in events:
                    blocks.take(batch)
            except grpc.aio.AioRpcError as error:
                if error.code() in _NO_EVENTS:
                    return
                _log.warning("the engine's cache events ended", backend=self._target, code=error.code().name)
            finally:
                events.cancel()
            await asyncio.sleep(self._config.reconnect_max_seconds)

    async def watch_health(self) -> AsyncGenerator[bool]:
        known = None
        while True:
            is_healthy = await self._is_healthy()
            if is_healthy and self._session is not None:
                self._session.note_alive()
            if is_healthy is not known:
                known = is_healthy
                yield is_healthy
            await asyncio.sleep(self._poll_seconds)

    def refusal(self, request: generation_pb2.GenerateRequest, *, resumes: bool) -> PenstockError | None:
        model, codec = self._model, self._codec
        if model is None:
            return None
        try:
            resolved = resolve_request(request, model)
        except PenstockError as error:
            return error
        found = lacking(resolved, model, codec.params, codec.constraints, resumes=resumes) or codec.lacks(resolved)
        return None if found is None else self._lacks(*found)

    def lacks_call(self, method: str) -> PenstockError | None:
        has_it = method in self._codec.calls
        if has_it and self._model is not None:
            # An engine is started for the one or for the other.
            has_it = self._model.generates is (method != "Embed")
        return None if has_it else self._lacks("request", f"{method} is not there")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _poll_seconds(self) -> float:
        return self._config.engine_poll_seconds

    def _lacks(self, field: str, why: str) -> InvalidArgument:
        return InvalidArgument(
            field, f"{why}: the backend is {self._codec.name} ({self._target})", reason="NOT_ON_BACKEND"
        )

    def _require_model(self) -> EngineModel:
        if self._model is None:
            raise Unavailable("the backend has not told its model yet", reason="NO_BACKEND")
        return self._model

    async def _ask(self, call: Callable[..., Any], request: Message) -> Any:
        return await call(request, timeout=self._config.connect_timeout_seconds)

    async def _is_healthy(self) -> bool:
        """Ask the engine's own call and the standard one. By its own alone an engine is healthy while it warms up, when
        requests take a hundred times as long, and while it shuts down."""
        if not (await self._ask(self._stub.HealthCheck, self._codec.messages.HealthCheckRequest())).healthy:
            return False
        try:
            told = await self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=self._codec.service))
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_HEALTH:
                raise
            return True
        return bool(told.status == health_pb2.HealthCheckResponse.SERVING)

    async def _send_aborts(self, requests: list[Message]) -> None:
        for request in requests:
            await self._ask(self._stub.Abort, request)

    async def _bundle(self, told: Any) -> BundleFacts | None:
        """Read the tokenizer's files; None where the engine does not send them."""
        chunks = self._stub.GetTokenizer(
            smg_common_pb2.GetTokenizerRequest(), timeout=self._config.start_timeout_seconds
        )
        ids = tuple(token_id for token_id in told.eos_token_ids if 0 <= token_id < told.vocab_size)
        try:
            return await read_bundle(chunks, self._config.max_tokenizer_bytes, ids, told.vocab_size)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_FILES:
                raise
            _log.warning("the engine does not send its tokenizer: its defaults are what it tells", backend=self._target)
            return None
        finally:
            chunks.cancel()
