"""Connection to another engine: its own health, facts and load, by polling, in the terms of the router."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from penstock.common.errors import InvalidArgument, PenstockError, StartupError, Unavailable
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.router.config import RouterConfig
from penstock.router.engines.engine_blocks import NAMED_TOKENS, EngineBlocks
from penstock.router.engines.engine_calls import EngineCalls
from penstock.router.engines.engine_codec import EngineCodec
from penstock.router.engines.engine_model import EngineModel, known_ids, read_model
from penstock.router.engines.engine_request import lacking, resolve_request
from penstock.router.engines.engine_services import EngineFacts, ToldLoad
from penstock.router.engines.engine_session import EngineSession
from penstock.router.engines.tokenizer_bundle import BundleFacts, read_bundle
from penstock.serving.transport import Channel, StreamCall
from penstock.v1 import admin_pb2, common_pb2, generation_pb2, model_pb2, tokenizer_pb2

# Answers of an engine that does not send its tokenizer's files.
_NO_FILES = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
# Answers of an engine that tells nothing of its cache: an older one, or one that was not started for it.
_NO_EVENTS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
# Blocks in which a share of memory is told.
_BLOCKS = 1000
_log = get_logger("penstock.router")


class EngineConnection:
    """Connection to another engine. Implements BackendConnection."""

    def __init__(
        self,
        channel: Channel,
        config: RouterConfig,
        codecs: Sequence[EngineCodec],
        target: str,
        tokenizer: Callable[[], tokenizer_pb2.GetTokenizerResponse],
    ) -> None:
        """Make it. `codecs` are of the protocols that it may speak, `target` is the configured name of the backend, for
        errors, `tokenizer` returns the facts of the router's own."""
        self._channel = channel
        self._config = config
        self._codecs = codecs
        self._target = target
        self._tokenizer = tokenizer
        suffix, numbers = secrets.token_hex(4), itertools.count()
        self._new_id = lambda: f"call-{suffix}-{next(numbers)}"
        self._use(codecs[0])
        self._model: EngineModel | None = None
        self._session: EngineSession | None = None
        # What it tells of its cached blocks; None: it is not asked.
        self._blocks: EngineBlocks | None = None

    def _use(self, codec: EngineCodec) -> None:
        """Speak this protocol."""
        self._codec = codec
        self._services = codec.connect(self._channel, self._config.connect_timeout_seconds)
        self.calls = EngineCalls(codec, self._services, lambda: self._require_model(), self._new_id)

    @property
    def keeps_salts(self) -> bool:
        return self._codec.keeps_salts

    async def until_serving(self, on_starting: Callable[[], object]) -> bool:
        """Raise StartupError for an engine that speaks none of the protocols."""
        await self._find_protocol()
        async with contextlib.aclosing(self.watch_health()) as updates:
            async for is_serving in updates:
                if is_serving:
                    return True
                on_starting()
        return False

    async def model_info(self) -> model_pb2.GetModelInfoResponse:
        told = await self._services.facts()
        bundle = await self._bundle(told)
        self._model = read_model(told, bundle, self._codec.max_top_logprobs, self._tokenizer())
        if self._config.prefix_reports:
            self._blocks = EngineBlocks(NAMED_TOKENS, self._config.max_known_blocks)
        if not self._codec.keeps_salts:
            # No engine tells whether its cache is on.
            _log.warning(
                "the engine's prefix cache, if it is on, is shared by all tenants and values of cache_salt: its "
                "protocol has no field for them. Where timing must not tell one tenant what another asked, switch it "
                "off there",
                backend=self._target,
                engine=self._codec.name,
            )
        return self._model.info

    async def open_session(self) -> StreamCall[generation_pb2.SessionResponse]:
        self._session = EngineSession(
            self._channel, self._codec, self._require_model(), self._services.abort, self._config.engine_silence_seconds
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
        while True:
            # One that does not tell has what this router sent.
            told = await self._services.load() or ToldLoad()
            usage = told.kv_usage
            ours = self._session.num_calls if self._session is not None else 0
            yield admin_pb2.Load(
                # An engine without statistics tells of nothing.
                running_requests=max(told.running, ours),
                waiting_requests=told.waiting,
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
            events = self._services.cache_events()
            if events is None:
                return
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
            is_healthy = await self._services.is_healthy()
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

    async def _find_protocol(self) -> None:
        """Take the first of the protocols that the engine speaks."""
        for codec in self._codecs:
            self._use(codec)
            try:
                await self._services.is_healthy()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                continue
            if len(self._codecs) > 1:
                _log.info("the engine's protocol", backend=self._target, protocol=codec.protocol)
            return
        names = " and no ".join(codec.protocol for codec in self._codecs)
        raise StartupError(f"the backend {self._target} has no {names}", flag="--backend")

    async def _bundle(self, told: EngineFacts) -> BundleFacts | None:
        """Read the tokenizer's files; None where the engine does not send them."""
        chunks = self._services.tokenizer_files(self._config.start_timeout_seconds)
        if chunks is None or told.vocab_size is None:
            _log.warning(
                "the engine's protocol tells no defaults of its model: a request without options is greedy",
                backend=self._target,
                protocol=self._codec.protocol,
            )
            return None
        ids = known_ids(told.eos_token_ids or (), told.vocab_size)
        try:
            return await read_bundle(chunks, self._config.max_tokenizer_bytes, ids, told.vocab_size)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_FILES:
                raise
            _log.warning("the engine does not send its tokenizer: its defaults are what it tells", backend=self._target)
            return None
        finally:
            chunks.cancel()
