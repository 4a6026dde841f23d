"""Answers to the lines of batches, by the handlers of HTTP's own routes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from penstock_client import AsyncClient

from penstock.common.acting_for import acting_for
from penstock.common.credentials import TokenFile
from penstock.common.errors import InvalidArgument, PenstockError, from_rpc_error
from penstock.common.idle_only import is_idle_only
from penstock.common.logging import get_logger
from penstock.common.request_context import current_request_id, new_request_id
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import Handler, HttpCall
from penstock.gateway.http_errors import OPENAI_ERRORS, internal, status_of
from penstock.gateway.json_body import parse_object
from penstock.gateway.kept_stores import KeptStores
from penstock.jobs.batch_runner import LineOutcome
from penstock.jobs.job_records import ENDPOINTS, TakenLine

_Code = grpc.StatusCode
# The line was not at fault, and its answer may come another time. UNAUTHENTICATED: the gateway's own token was
# replaced.
_LATER = frozenset(
    (_Code.UNAVAILABLE, _Code.ABORTED, _Code.DEADLINE_EXCEEDED, _Code.UNAUTHENTICATED, _Code.CANCELLED, _Code.UNKNOWN)
)
# An operator ended it.
_FINAL = frozenset(("ABORTED",))
# Reasons of RESOURCE_EXHAUSTED that a wait cures.
_FULL = frozenset(("QUEUE_FULL", "OVERLOADED", "TOO_MANY_RPCS", "TOO_MANY_SEQUENCES", "MODEL_SLOTS_FULL"))
_FULL |= {"ADAPTER_MEMORY_FULL", "ADAPTER_SLOTS_FULL", "ADAPTER_LOADS_FULL", "ADAPTER_DISK_FULL", "QUOTA_EXCEEDED"}
# Endpoints with a cache of prefixes; characters of a caller's digest that keep it apart.
_SALTED = frozenset(ENDPOINTS) - {"/v1/embeddings"}
_SALT_CHARS = 32
# Lines up to this size are parsed on the event loop.
_PARSED_AT_ONCE_BYTES = 16 << 10
_log = get_logger("penstock.gateway")


class LineAnswers:
    """Sends lines to their endpoints as calls of their own, without a deadline and on idle capacity only."""

    def __init__(
        self,
        config: GatewayConfig,
        client: Callable[[], AsyncClient],
        handlers: Mapping[str, Handler],
        kept: KeptStores | None,
    ) -> None:
        """`client`: returns that of the next call. `handlers`: by the paths of their routes."""
        # A line waits for as long as others are there.
        self._config = dataclasses.replace(config, answer_seconds=None)
        self._client, self._handlers, self._kept = client, handlers, kept

    async def answer(self, line: TakenLine, data: bytes) -> LineOutcome:
        """Return the answer to a line, or that there is none now."""
        request_id = new_request_id()
        current_request_id.set(request_id)
        is_idle_only.set(True)
        acting_for.set(line.key_digest)
        call: HttpCall | None = None
        try:
            call = HttpCall(
                await self._body(line, data),
                self._client(),
                self._config,
                request_id=request_id,
                header_id=request_id,
                owner=line.owner,
                kept=self._kept,
            )
            answer = await self._handlers[line.endpoint](call)
            if not isinstance(answer, bytes):
                raise InvalidArgument("stream", "must not be true in a batch")
            return LineOutcome(200, call.shown_id, answer)
        except PenstockError as error:
            failure = error
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
        except TimeoutError:
            return LineOutcome(504, request_id, None)
        except Exception:
            _log.exception("a line of a batch failed", batch=line.batch_id)
            failure = internal()
        is_lost = failure.reason == "BACKEND_LOST"
        if (_is_for_later(failure) or (line.key_digest and _is_of_own_key(failure))) and not is_lost:
            return LineOutcome(status_of(failure), request_id, None)
        names = call.names if call is not None else {}
        return LineOutcome(status_of(failure), request_id, OPENAI_ERRORS.body(failure, names), is_lost)

    async def _body(self, line: TakenLine, data: bytes) -> dict[str, Any]:
        bounds = self._config.body_bounds
        if len(data) <= _PARSED_AT_ONCE_BYTES:
            read = parse_object(data, bounds)
        else:
            read = await asyncio.to_thread(parse_object, data, bounds)
        body = read.get("body")
        if not isinstance(body, dict):
            raise InvalidArgument("body", "must be a JSON object")
        salt = body.get("cache_salt") or ""
        if line.owner and line.endpoint in _SALTED and isinstance(salt, str):
            # Without keys all lines have one tenant at the router: callers' prefixes are kept apart here.
            body["cache_salt"] = line.owner[:_SALT_CHARS] + salt
        return body


class JobClients:
    """Clients of the calls that lines become."""

    def __init__(self, client: AsyncClient, token_file: str | None) -> None:
        """`client`: the gateway's own. Raises StartupError naming --job-token-file."""
        self._client = client
        self._tokens = TokenFile(token_file, "--job-token-file") if token_file else None
        # Checked now: a token never travels in the clear.
        self._authorization = ""
        self._with_token = client
        if self._tokens is not None:
            self.next()

    def next(self) -> AsyncClient:
        """Return a client with the present token. Raises Unauthenticated when the file has none any more."""
        if self._tokens is None:
            return self._client
        authorization = self._tokens.authorization()
        if authorization != self._authorization:
            self._authorization = authorization
            self._with_token = self._client.with_token(authorization.partition(" ")[2])
        return self._with_token


def _is_for_later(error: PenstockError) -> bool:
    if error.code is _Code.RESOURCE_EXHAUSTED:
        # A request that is larger than the quota of its key never fits.
        return error.reason in _FULL and (error.reason != "QUOTA_EXCEEDED" or error.retry_after_seconds is not None)
    return error.code in _LATER and error.reason not in _FINAL


def _is_of_own_key(error: PenstockError) -> bool:
    """True for a scope that the gateway's own key lacks: an operator took it away."""
    return error.reason == "SCOPE_MISSING" and "key" not in error.metadata
