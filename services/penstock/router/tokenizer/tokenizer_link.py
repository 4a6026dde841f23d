"""Connection to the tokenizer: unary calls, the one DecodeStream, reconnection, and failover to a standby."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.errors import DeadlineExceeded, Internal, PenstockError, StartupError, Unavailable, from_rpc_error
from penstock.common.logging import get_logger
from penstock.router.aio import is_cancelled, until_first, until_silent
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.serving.channels import until_serving, watch_health
from penstock.serving.transport import Channel, make_transport
from penstock.text.decode_table import Table
from penstock.text.detokenizer import DecodeTable, TableKind
from penstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc

HEALTH_NAME = "penstock.v1.TokenizerService"
# Tries of one unary call: it is sent again only if the tokenizer could not be reached.
MAX_TRIES = 3
_DRAINING = "DRAINING"
# Pings within the silence that counts as a loss.
_PINGS = 8
AnswerT = TypeVar("AnswerT")
_KINDS: dict[int, TableKind] = {
    tokenizer_pb2.DECODE_TABLE_KIND_BYTE_LEVEL: "byte_level",
    tokenizer_pb2.DECODE_TABLE_KIND_BYTE_FALLBACK: "byte_fallback",
}
_log = get_logger("penstock.router")


class _Lost(Exception):
    """Loss of the connection; the message is for the log."""


class TokenizerLink:
    """Link to one of the configured tokenizers. Belongs to one event loop."""

    def __init__(
        self, config: RouterConfig, detokenizer: Detokenizer, metrics: RouterMetrics, *, on_change: Callable[[], None]
    ) -> None:
        self.info: tokenizer_pb2.GetTokenizerResponse | None = None
        self.last_problem = "no answer"
        self._config = config
        self._transport = make_transport(config)
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._on_change = on_change
        self._stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub | None = None
        self._ready = asyncio.Event()
        self._lost_at = time.monotonic()
        # time.monotonic() until which a process that does not serve yet counts as starting.
        self._starting_until = 0.0
        # Waiting calls with a single answer, and signs of life meanwhile: answers to calls and to pings.
        self._waiting = 0
        self._answers = 0
        # True: this connection ends because nothing answered.
        self._is_silent = False
        # Chosen at the first connection: one place must decode a live sequence.
        self._is_decoding_chosen = config.detokenize == "tokenizer"

    @property
    def is_ready(self) -> bool:
        """True while the tokenizer answers."""
        return self._ready.is_set()

    @property
    def fingerprint(self) -> str:
        """Fingerprint (sha256) to compare with models'; empty before the first connection."""
        return self.info.tokenizer_fingerprint if self.info is not None else ""

    async def wait_ready(self) -> None:
        """Return once the tokenizer answers."""
        await self._ready.wait()

    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout: float | None) -> tokenizer_pb2.EncodeResponse:
        """Encode texts. Raises PenstockError: Unavailable when no tokenizer comes back in time."""
        return await self._call(lambda stub, left: stub.Encode(request, timeout=left), timeout)

    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout: float | None) -> tokenizer_pb2.DecodeResponse:
        """Decode ids. Raises as `encode`."""
        return await self._call(lambda stub, left: stub.Decode(request, timeout=left), timeout)

    async def apply_chat_template(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, timeout: float | None
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Render and encode. Raises as `encode`."""
        return await self._call(lambda stub, left: stub.ApplyChatTemplate(request, timeout=left), timeout)

    async def run(self) -> None:
        """Stay connected until cancelled, to the first address that answers."""
        wait = self._config.reconnect_min_seconds
        while True:
            for address in self._config.tokenizer:
                if await self._try(address):
                    wait = self._config.reconnect_min_seconds
                self._give_up_late()
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._config.reconnect_max_seconds)

    async def _try(self, address: str) -> bool:
        """Run one connection from start to end; True if it was ever ready."""
        was_ready = False
        try:
            await self._connect_and_serve(address)
        except grpc.aio.AioRpcError as error:
            self.last_problem = error.code().name
        except (_Lost, PenstockError, StartupError, asyncio.InvalidStateError) as error:
            # StartupError: a TLS or token file cannot be read, perhaps because it is being replaced.
            # InvalidStateError: a message was written to a stream that had just ended.
            self.last_problem = str(error)
        finally:
            was_ready = self.is_ready
            self._lost(self._silent_seconds() if self._is_silent else 0.0)
            self._is_silent = False
        _log.info("tokenizer connection ended", tokenizer=address, cause=self.last_problem, was_ready=was_ready)
        return was_ready

    def _lost(self, silent_seconds: float) -> None:
        if self.is_ready:
            self._ready.clear()
            self._stub = None
            self._lost_at = time.monotonic() - silent_seconds
            # An attempt to connect to a stopped one may take longer than the streams may wait.
            asyncio.get_running_loop().call_later(self._left_for_streams(), self._give_up_in_time)
            self._metrics.tokenizer_reconnects.inc()
            self._on_change()

    def _silent_seconds(self) -> float:
        """Part of the streams' wait that a silent tokenizer has used up; some time is left for another one."""
        config = self._config
        return max(
            0.0, min(config.tokenizer_stall_seconds, config.tokenizer_wait_seconds - config.reconnect_max_seconds)
        )

    def _give_up_in_time(self) -> None:
        """Fail streams as soon as they have waited too long."""
        self._give_up_late()
        if not self.is_ready and (left := self._left_for_streams()) > 0:
            asyncio.get_running_loop().call_later(left, self._give_up_in_time)

    def _give_up_late(self) -> None:
        """Fail streams that have waited too long for text without a tokenizer."""
        if not self.is_ready and self._left_for_streams() <= 0:
            self._detokenizer.fail_outstanding(_away())

    def _left_for_streams(self) -> float:
        """Seconds that streams still wait for the lost tokenizer."""
        return self._lost_at + self._longest_wait_seconds - time.monotonic()

    @property
    def _longest_wait_seconds(self) -> float:
        """Time that streams wait for a lost tokenizer: longer if a process is there that does not serve yet."""
        config = self._config
        is_starting = time.monotonic() < self._starting_until
        return max(config.tokenizer_wait_seconds, config.start_timeout_seconds if is_starting else 0.0)

    async def _connect_and_serve(self, address: str) -> None:
        timeout = self._config.connect_timeout_seconds
        async with self._transport.open_channel(address, self._config, connect_timeout_seconds=timeout) as channel:
            await self._serve(channel, tokenizer_pb2_grpc.TokenizerServiceStub(channel.for_stubs), address)

    async def _serve(self, channel: Channel, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, address: str) -> None:
        await self._wait_until_serving(channel)
        request = tokenizer_pb2.GetTokenizerRequest()
        info = await stub.GetTokenizer(request, timeout=self._config.connect_timeout_seconds)
        self._check(info, address)
        table = await self._decode_table(stub)
        parse = tokenizer_pb2.DecodeStreamResponse.FromString
        call = await channel.open_stream(f"/{HEALTH_NAME}/DecodeStream", parse)
        self.info, self._stub = info, stub
        self._choose_decoding(table)
        self._detokenizer.connected()
        self._ready.set()
        self._on_change()
        _log.info("tokenizer connected", tokenizer=address, fingerprint=info.tokenizer_fingerprint[:12])
        try:
            await until_first(
                self._detokenizer.run_reader(call),
                self._detokenizer.run_writer(call),
                self._watch_health(channel),
                self._watch_stream(),
                self._watch_calls(),
                self._ping(channel),
            )
            raise _Lost("a stream ended")
        finally:
            call.cancel()

    async def _decode_table(self, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub) -> DecodeTable | None:
        if self._is_decoding_chosen:
            return None
        request = tokenizer_pb2.GetDecodeTableRequest()
        return await fetch_decode_table(stub.GetDecodeTable(request, timeout=self._config.connect_timeout_seconds))

    def _choose_decoding(self, table: DecodeTable | None) -> None:
        """Choose the place that turns ids into text, once this tokenizer is the one that later ones must equal."""
        if table is not None:
            self._detokenizer.use_table(table)
        self._is_decoding_chosen = True

    def _check(self, info: tokenizer_pb2.GetTokenizerResponse, address: str) -> None:
        """Check that a returning tokenizer is the same one: live streams hold its ids. Raises _Lost."""
        known = self.fingerprint
        if known and info.tokenizer_fingerprint != known:
            _log.error("tokenizer not used: it is not the one this router started with", tokenizer=address)
            raise _Lost("another tokenizer than before")

    async def _wait_until_serving(self, channel: Channel) -> None:
        """Wait while the tokenizer loads, for at most the time of a connection attempt, before coming back later."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                await until_serving(channel.for_stubs, HEALTH_NAME, self._note_starting)
        except TimeoutError:
            raise _Lost("it does not serve yet") from None

    def _note_starting(self) -> None:
        """Note that a process is there but does not serve yet. It counts as there until the next check."""
        config = self._config
        round_seconds = (config.connect_timeout_seconds + config.reconnect_max_seconds) * len(config.tokenizer)
        self._starting_until = time.monotonic() + config.connect_timeout_seconds + round_seconds

    async def _watch_health(self, channel: Channel) -> None:
        """Return when the process stops answering; on NOT_SERVING alone (draining) live streams continue."""
        async with contextlib.aclosing(watch_health(channel.for_stubs, HEALTH_NAME)) as updates:
            async for _ in updates:
                pass

    async def _watch_stream(self) -> None:
        """Raise _Lost once the messages of the DecodeStream have waited for too long."""
        detokenizer = self._detokenizer
        await self._until_silent(lambda: detokenizer.answers, lambda: detokenizer.outstanding > 0)

    async def _watch_calls(self) -> None:
        """Raise _Lost once calls and pings have both waited for too long: a call alone may take long."""
        await self._until_silent(lambda: self._answers, lambda: self._waiting > 0)

    async def _until_silent(self, signs: Callable[[], int], is_due: Callable[[], bool]) -> None:
        limit = self._config.tokenizer_stall_seconds
        await until_silent(limit, signs, is_due)
        self._is_silent = True
        raise _Lost(f"no answer for {limit:g} s")

    async def _ping(self, channel: Channel) -> None:
        """Ping while calls wait: a stopped or disconnected process does not answer, a busy one does."""
        health = health_pb2_grpc.HealthStub(channel.for_stubs)
        request = health_pb2.HealthCheckRequest(service=HEALTH_NAME)
        while True:
            await asyncio.sleep(self._config.tokenizer_stall_seconds / _PINGS)
            if self._waiting:
                await health.Check(request)
                self._answers += 1

    async def _call(
        self,
        call: Callable[[tokenizer_pb2_grpc.TokenizerServiceAsyncStub, float | None], Awaitable[AnswerT]],
        timeout: float | None,
    ) -> AnswerT:
        begin = time.monotonic()
        until = None if timeout is None else begin + timeout
        tries, pause = 0, self._config.reconnect_min_seconds
        while tries < MAX_TRIES:
            stub = await self._wait_for_stub(begin, until)
            left = None if until is None else until - time.monotonic()
            self._waiting += 1
            try:
                answer = await call(stub, left)
                self._answers += 1
                return answer
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                # This process closed its end of the connection, since the tokenizer was silent.
                if self._stub is stub or error.code() is not grpc.StatusCode.CANCELLED:
                    if isinstance(failure, DeadlineExceeded):
                        raise _late() from error
                    # One that drains comes back, or another does: it is waited for as one that is away.
                    is_draining = failure.reason == _DRAINING
                    tries += not (is_draining and time.monotonic() < begin + self._longest_wait_seconds)
                    if not isinstance(failure, Unavailable) or tries == MAX_TRIES:
                        raise failure from error
                else:
                    tries += 1
                if self._stub is stub:
                    # Refused rather than lost: give the link a moment to notice.
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._config.reconnect_max_seconds)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                # The same, by grpc.aio.
                tries += 1
            finally:
                self._waiting -= 1
        raise _away()

    async def _wait_for_stub(self, begin: float, until: float | None) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
        """Return the stub once there is one. `begin`: the call's time; a silent tokenizer's time counts."""
        if self._stub is not None:
            return self._stub
        config = self._config
        # Some time is always left to reach another one.
        least = min(config.tokenizer_wait_seconds, config.reconnect_max_seconds)
        least_until = time.monotonic() + least
        while not self.is_ready:
            patience = max(begin + self._longest_wait_seconds, least_until) - time.monotonic()
            left = patience if until is None else min(patience, until - time.monotonic())
            if left <= 0:
                raise _away() if left == patience else _late()
            # In parts: one may turn out to be starting, or to have stopped.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, config.connect_timeout_seconds)):
                    await self._ready.wait()
        if self._stub is None:
            raise _away()
        return self._stub


async def fetch_decode_table(parts: AsyncIterable[tokenizer_pb2.GetDecodeTableResponse]) -> DecodeTable | None:
    """Fetch the tokenizer's decoder as a table, with which the router turns ids into text itself.

    None when its decoder is not a table, or when its release is too old to have the call.
    Raises grpc.aio.AioRpcError, and Internal for a table that contradicts itself.
    """
    head: tokenizer_pb2.GetDecodeTableResponse | None = None
    pieces: list[bytes] = []
    try:
        async for part in parts:
            head = head or part
            pieces += part.pieces
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    kind = _KINDS.get(head.kind) if head is not None else None
    if head is None or kind is None:
        return None
    try:
        table = Table.of(pieces, frozenset(head.lone_byte_ids))
        return DecodeTable(kind, table, list(head.special_token_ids), head.strip, head.strip_count)
    except IndexError:
        raise Internal("the tokenizer's table refers to ids outside of it", reason="TOKENIZER_PROTOCOL") from None


def _away() -> Unavailable:
    return Unavailable("the tokenizer cannot be reached", reason="TOKENIZER_UNAVAILABLE", retry_after_seconds=1.0)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the prompt was tokenized", reason="DEADLINE_EXCEEDED")
