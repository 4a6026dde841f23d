"""Callers by their tokens: the router is asked before a request is read, and its answer is kept for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import grpc
from penstock_client import AsyncClient

from penstock.common.credentials import bearer_token
from penstock.common.errors import DeadlineExceeded, PenstockError, ResourceExhausted, Unauthenticated, from_rpc_error
from penstock.gateway.config import GatewayConfig
from penstock.gateway.places import ANYBODY

T = TypeVar("T")
# Token checks at the router at a time; others wait for their turn, up to the second number in total.
_QUESTIONS, _MOST_QUESTIONS = 16, 256
# Longest token that is checked, and number of refused ones that are remembered.
_MOST_TOKEN_BYTES, _MOST_REFUSED = 4096, 512
# Seconds for which a refused token is refused without a check.
_REFUSED_SECONDS = 1.0
# Statuses of a call with accepted credentials, whatever its outcome.
_LET_IN = frozenset(
    (
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
)
# Statuses that say nothing about credentials: a token that was valid a moment ago still is.
_UNKNOWN = frozenset(
    (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    )
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller that the router accepts."""

    client: AsyncClient
    # The token, if the router asks for one; ANYBODY if none was checked.
    tenant: str


class Callers:
    """Callers of one gateway, by their tokens. Belongs to one event loop.

    They share one connection to the router, with a view of it for each token. The router still checks every request:
    the memory here only decides which bodies are read.
    """

    def __init__(self, client: AsyncClient, config: GatewayConfig) -> None:
        self._client = client
        host = config.router.rpartition(":")[0].strip("[]")
        # A token must not travel unencrypted; a router without tokens does not need it.
        self._passes_tokens = config.is_channel_tls or host in ("localhost", "127.0.0.1", "::1")
        self._has_own_token = config.channel_token_file is not None
        self._seconds, self._most = config.token_seconds, config.max_known_tokens
        self._question_seconds = config.connect_timeout_seconds
        # Token -> caller, and the time until which it needs no check; the last used at the end.
        self._known: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        # Refused tokens: message and reason, and the time until which they hold. Not the error: its traceback would
        # grow with every request that it ends.
        self._refused: OrderedDict[str, tuple[tuple[str, str], float]] = OrderedDict()
        self._questions: dict[str, asyncio.Task[Caller]] = {}
        self._turns = asyncio.Semaphore(_QUESTIONS)

    @property
    def passes_tokens(self) -> bool:
        """True when callers' tokens reach the router."""
        return self._passes_tokens

    @property
    def anybody(self) -> AsyncClient:
        """The client without a caller's token."""
        return self._client

    def is_known(self, authorization: bytes | None) -> bool:
        """True for a token that the router accepted at the last check, or when it asked for none."""
        try:
            token = self._token(authorization)
        except Unauthenticated:
            return False
        return token in self._known or (not self._has_own_token and ANYBODY in self._known)

    async def admit(self, authorization: bytes | None) -> Caller:
        """Return the caller with this header. Raises Unauthenticated, or the error of a router that cannot answer."""
        token = self._token(authorization)
        now = time.monotonic()
        if (caller := self._recent(token, now)) is not None:
            return caller
        if not self._has_own_token and (caller := self._recent(ANYBODY, now)) is not None:
            # The router asks for no tokens.
            return caller
        return await self._answer(token)

    def close(self) -> None:
        """Cancel the open checks."""
        for question in list(self._questions.values()):
            question.cancel()

    async def _answer(self, token: str) -> Caller:
        """Return the result of a token's check, which runs once for all that wait for it."""
        if (refused := self._refused.get(token)) is not None and refused[1] > time.monotonic():
            message, reason = refused[0]
            raise Unauthenticated(message, reason=reason)
        question = self._questions.get(token)
        if question is None:
            if len(self._questions) >= _MOST_QUESTIONS:
                raise ResourceExhausted(
                    "the router has too many tokens to check", reason="OVERLOADED", retry_after_seconds=1.0
                )
            question = self._questions[token] = asyncio.create_task(self._ask(token))
            question.add_done_callback(lambda done: self._answered(token, done))
        # One of several that wait for it may leave.
        return await asyncio.shield(question)

    def _answered(self, token: str, question: asyncio.Task[Caller]) -> None:
        del self._questions[token]
        if not question.cancelled():
            # Retrieved, although all that asked may have left.
            question.exception()

    def _recent(self, token: str, now: float) -> Caller | None:
        found = self._known.get(token)
        if found is None or found[1] <= now:
            return None
        self._known.move_to_end(token)
        return found[0]

    def _token(self, authorization: bytes | None) -> str:
        """Return the token to pass on. Raises Unauthenticated for an invalid one."""
        token = bearer_token(authorization)
        if not token or not self._passes_tokens:
            return ANYBODY
        if len(token) > _MOST_TOKEN_BYTES:
            # All callers' tokens share one connection, and the router would end it for headers that are too large.
            raise Unauthenticated(f"the bearer token has more than {_MOST_TOKEN_BYTES} bytes", reason="UNAUTHENTICATED")
        try:
            text = token.decode("ascii")
        except UnicodeDecodeError:
            text = "\n"
        if not text.isprintable():
            raise Unauthenticated("the bearer token has characters that are not allowed", reason="UNAUTHENTICATED")
        return text

    async def _ask(self, token: str) -> Caller:
        """Ask the router, first without a token: if it asks for none, tokens are not told apart."""
        if token != ANYBODY and token not in self._known and not self._has_own_token:
            with contextlib.suppress(Unauthenticated):
                return await self._answer(ANYBODY)
        return await self._judge(token)

    async def _judge(self, token: str) -> Caller:
        caller = Caller(self._client if token == ANYBODY else self._client.with_token(token), token)
        try:
            async with asyncio.timeout(self._question_seconds), self._turns:
                await caller.client.list_models()
        except (PenstockError, grpc.RpcError, TimeoutError) as failure:
            error = _error_of(failure)
            if error.code in _UNKNOWN and (stale := self._known.get(token)) is not None:
                return stale[0]
            if error.code not in _LET_IN:
                if isinstance(error, Unauthenticated):
                    told = (error.message, error.reason), time.monotonic() + _REFUSED_SECONDS
                    _keep(self._refused, token, told, _MOST_REFUSED)
                    self._known.pop(token, None)
                raise error from None
        self._refused.pop(token, None)
        _keep(self._known, token, (caller, time.monotonic() + self._seconds), self._most)
        return caller


def _error_of(failure: Exception) -> PenstockError:
    if isinstance(failure, PenstockError):
        return failure
    if isinstance(failure, grpc.RpcError):
        return from_rpc_error(failure)
    return DeadlineExceeded("the router did not answer in time", reason="DEADLINE_EXCEEDED")


def _keep(kept: OrderedDict[str, T], token: str, value: T, most: int) -> None:
    """Keep an entry as the last used; the least recently used one goes."""
    kept[token] = value
    kept.move_to_end(token)
    if len(kept) > most:
        kept.popitem(last=False)
