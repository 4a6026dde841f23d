"""Callers by their tokens: the router is asked before anything of a request is taken, and its answer kept a moment."""

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
# Questions to the router at a time; others wait for their turn, up to the second number of all.
_QUESTIONS, _MOST_QUESTIONS = 16, 256
# Longest token that is asked about, and refused ones that are remembered.
_MOST_TOKEN_BYTES, _MOST_REFUSED = 4096, 512
# Seconds for which a refused token is refused without asking.
_REFUSED_SECONDS = 1.0
# Statuses of a call that its credentials let in, whatever became of it.
_LET_IN = frozenset(
    (
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
)
# Statuses that say nothing about credentials: a token that was good a moment ago is so still.
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
    """Somebody whose requests the router takes."""

    client: AsyncClient
    # The token, where the router asks for one; ANYBODY where none was judged.
    tenant: str


class Callers:
    """Callers of one gateway, by the tokens that they show. Belongs to one event loop.

    One connection to the router, a view of it for each token. The router judges every request all the same: what is
    kept here only decides whose body is read.
    """

    def __init__(self, client: AsyncClient, config: GatewayConfig) -> None:
        self._client = client
        host = config.router.rpartition(":")[0].strip("[]")
        # A token must not travel in the clear; a router without tokens does not miss it.
        self._passes_tokens = config.is_channel_tls or host in ("localhost", "127.0.0.1", "::1")
        self._has_own_token = config.channel_token_file is not None
        self._seconds, self._most = config.token_seconds, config.max_known_tokens
        self._question_seconds = config.connect_timeout_seconds
        # By token, those last used at the end: the caller, and the time until which it needs no question.
        self._known: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        # Refused ones: the words for it, and the time until which it stands. Not the error, whose traceback grows with
        # every request that it ends.
        self._refused: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._questions: dict[str, asyncio.Task[Caller]] = {}
        self._turns = asyncio.Semaphore(_QUESTIONS)

    @property
    def passes_tokens(self) -> bool:
        """True when callers' tokens reach the router."""
        return self._passes_tokens

    @property
    def anybody(self) -> AsyncClient:
        """The client that shows no caller's token."""
        return self._client

    def is_known(self, authorization: bytes | None) -> bool:
        """True for a token that the router took when it was last asked, or where it asked for none."""
        try:
            token = self._token(authorization)
        except Unauthenticated:
            return False
        return token in self._known or (not self._has_own_token and ANYBODY in self._known)

    async def admit(self, authorization: bytes | None) -> Caller:
        """Return the caller with this header. Raises Unauthenticated, or the error of a router that cannot be asked."""
        token = self._token(authorization)
        now = time.monotonic()
        if (caller := self._recent(token, now)) is not None:
            return caller
        if not self._has_own_token and (caller := self._recent(ANYBODY, now)) is not None:
            # The router asks nobody for a token.
            return caller
        return await self._answer(token)

    def close(self) -> None:
        """Give up the questions that are open."""
        for question in list(self._questions.values()):
            question.cancel()

    async def _answer(self, token: str) -> Caller:
        """Return the answer to the question about a token, which is asked once for all who wait for it."""
        if (refused := self._refused.get(token)) is not None and refused[1] > time.monotonic():
            raise Unauthenticated(refused[0], reason="UNAUTHENTICATED")
        question = self._questions.get(token)
        if question is None:
            if len(self._questions) >= _MOST_QUESTIONS:
                raise ResourceExhausted(
                    "the router has too many tokens to judge", reason="OVERLOADED", retry_after_seconds=1.0
                )
            question = self._questions[token] = asyncio.create_task(self._ask(token))
            question.add_done_callback(lambda done: self._answered(token, done))
        # Of several that wait for it one may leave.
        return await asyncio.shield(question)

    def _answered(self, token: str, question: asyncio.Task[Caller]) -> None:
        del self._questions[token]
        if not question.cancelled():
            # Looked at, though all who asked may have left.
            question.exception()

    def _recent(self, token: str, now: float) -> Caller | None:
        found = self._known.get(token)
        if found is None or found[1] <= now:
            return None
        self._known.move_to_end(token)
        return found[0]

    def _token(self, authorization: bytes | None) -> str:
        """Return the token that is passed on. Raises Unauthenticated for one that is none."""
        token = bearer_token(authorization)
        if not token or not self._passes_tokens:
            return ANYBODY
        if len(token) > _MOST_TOKEN_BYTES:
            # All callers' tokens go over one connection, which the router ends for headers that are too large.
            raise Unauthenticated(f"the bearer token has more than {_MOST_TOKEN_BYTES} bytes", reason="UNAUTHENTICATED")
        try:
            text = token.decode("ascii")
        except UnicodeDecodeError:
            text = "\n"
        if not text.isprintable():
            raise Unauthenticated("the bearer token has characters that no token has", reason="UNAUTHENTICATED")
        return text

    async def _ask(self, token: str) -> Caller:
        """Ask the router. Without a token first: where it asks for none, no token is told from another."""
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
                    _keep(self._refused, token, (error.message, time.monotonic() + _REFUSED_SECONDS), _MOST_REFUSED)
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
    """Keep an entry as the one last used; the one that was not used for longest leaves."""
    kept[token] = value
    kept.move_to_end(token)
    if len(kept) > most:
        kept.popitem(last=False)
