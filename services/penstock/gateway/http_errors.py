"""Errors in the form of OpenAI's and Anthropic's APIs: a status and an object with Penstock's reason and field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from penstock.common.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    from_rpc_error,
)
from penstock.common.logging import get_logger

_Code = grpc.StatusCode
_STATUSES: Mapping[_Code, tuple[int, str]] = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, "not_found_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.CANCELLED: (499, "cancelled_error"),
    _Code.INTERNAL: (500, "server_error"),
    _Code.ABORTED: (500, "server_error"),
    _Code.UNIMPLEMENTED: (501, "server_error"),
    _Code.UNAVAILABLE: (503, "service_unavailable_error"),
    _Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# Reasons of RESOURCE_EXHAUSTED that no wait cures: the request, or its answer, is too large.
_TOO_LARGE = frozenset(("EXCEEDS_KV_POOL", "MESSAGE_TOO_LARGE", "RESPONSE_TOO_LARGE", "FILE_TOO_LARGE"))
# Faults of HTTP itself; all other faults are the request's.
_HTTP_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# OpenAI's codes for Penstock's reasons; other reasons appear in lower case.
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "KEY_REVOKED": "invalid_api_key",
    "KEY_EXPIRED": "invalid_api_key",
    "QUOTA_EXCEEDED": "rate_limit_exceeded",
}
# The quota of a key that no client waits for, in its own words and in OpenAI's.
_DAY_QUOTA, _NO_QUOTA_LEFT = "tokens_per_day", "insufficient_quota"
# Anthropic's types where they differ: https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error", 503: "overloaded_error"}
# Messages of the protos, which HTTP's fields do not have.
_TOOL = re.compile(r"tools\[\d+\]")
_CALL = re.compile(r"(\.tool_calls\[\d+\]\.)(name|arguments)$")
_SECTIONS = ("config", "stop", "output", "constraint")
_log = get_logger("penstock.gateway")


class HttpError(PenstockError):
    """A fault of HTTP itself, with its status."""

    def __init__(self, status: int, message: str, *, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, reason=reason, retry_after_seconds=retry_after_seconds)
        self.status = status


def status_of(error: PenstockError) -> int:
    """HTTP status of this error."""
    if isinstance(error, HttpError):
        return error.status
    return 413 if error.reason in _TOO_LARGE else _STATUSES.get(error.code, (500, ""))[0]


def error_body(error: PenstockError, names: Mapping[str, str]) -> dict[str, Any]:
    """Return OpenAI's object. `names`: option -> its name in the request."""
    status = status_of(error)
    if isinstance(error, HttpError) or status == 413:
        kind = _HTTP_TYPES.get(status, "invalid_request_error")
    else:
        kind = _STATUSES.get(error.code, (500, "server_error"))[1]
    code = _CODES.get(error.reason, error.reason.lower())
    if error.metadata.get("quota") == _DAY_QUOTA:
        kind = code = _NO_QUOTA_LEFT
    # The body as a whole is not a parameter.
    param = None if error.field in (None, "body") else http_name(error.field or "", names)
    message = error.message
    if isinstance(error, InvalidArgument) and param is not None:
        # With the request's own name.
        message = f"{param}: {error.description}"
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            "reason": error.reason,
            "field": error.field,
        }
    }


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Form of errors that a route's callers expect: as a complete answer, and as the last event of a stream.

    Both are made from the error and the request's names of options.
    """

    whole: Callable[[PenstockError, Mapping[str, str]], Any]
    # Line before the event's data.
    event: bytes = b""

    def body(self, error: PenstockError, names: Mapping[str, str]) -> bytes:
        """Return a complete answer."""
        return json.dumps(self.whole(error, names), ensure_ascii=False).encode("utf-8", "replace")

    def last_event(self, error: PenstockError, names: Mapping[str, str]) -> bytes:
        """Return an event."""
        return self.event + b"data: " + self.body(error, names) + b"\n\n"


def _typed_body(error: PenstockError, names: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "error", **error_body(error, names)}


def _anthropic_body(error: PenstockError, names: Mapping[str, str]) -> dict[str, Any]:
    made = _typed_body(error, names)
    if made["error"]["type"] == _NO_QUOTA_LEFT:
        made["error"]["type"] = "rate_limit_error"
    made["error"]["type"] = _ANTHROPIC_TYPES.get(status_of(error), made["error"]["type"])
    return made


OPENAI_ERRORS = ErrorShape(error_body)
# For /v1/responses: the events of its streams have names.
RESPONSE_ERRORS = ErrorShape(_typed_body, b"event: error\n")
ANTHROPIC_ERRORS = ErrorShape(_anthropic_body, b"event: error\n")


def error_headers(error: PenstockError) -> list[tuple[bytes, bytes]]:
    """Headers that say when to try again, or not to: OpenAI's clients obey both. And those of a quota."""
    quota = error.metadata.get("quota", "")
    found = _quota_headers(error, quota) if quota else []
    if error.retry_after_seconds is not None:
        # The header has only whole seconds.
        found.append((b"retry-after", str(max(1, math.ceil(error.retry_after_seconds))).encode()))
        if quota == _DAY_QUOTA:
            # A client that asks again and again until midnight helps nobody.
            found.append((b"x-should-retry", b"false"))
        return found
    if status_of(error) == 401:
        return [(b"www-authenticate", b"Bearer")]
    # A request that no free place would help, such as one too large for the pool.
    return [*found, (b"x-should-retry", b"false")] if error.code is _Code.RESOURCE_EXHAUSTED else []


def _quota_headers(error: PenstockError, quota: str) -> list[tuple[bytes, bytes]]:
    """Make the headers of OpenAI's rate limits (https://platform.openai.com/docs/guides/rate-limits)."""
    unit = b"requests" if "requests" in quota else b"tokens"
    found = [
        (b"x-ratelimit-%b-%b" % (name, unit), error.metadata.get(name.decode(), "0").encode())
        for name in (b"limit", b"remaining")
    ]
    if error.retry_after_seconds is not None:
        found.append((b"x-ratelimit-reset-" + unit, f"{error.retry_after_seconds:.3f}s".encode()))
    return found


def http_name(field: str, names: Mapping[str, str]) -> str:
    """The request's name for a proto's field: `config.max_new_tokens` may be `max_tokens`."""
    section, _, rest = field.partition(".")
    name = _CALL.sub(r"\1function.\2", rest if section in _SECTIONS and rest[:1].isalpha() else field)
    if (place := _TOOL.match(name)) is not None and place[0] in names:
        return names[place[0]] + name[place.end() :]
    head, bracket, tail = name.partition("[")
    return names.get(head, head) + bracket + tail


def internal() -> Internal:
    """The error for a fault that is in the log."""
    return Internal("internal error; the log has the cause", reason="INTERNAL")


async def known_errors(work: Awaitable[Any]) -> Any:
    """Await `work`. Raises PenstockError for every error in it."""
    try:
        return await work
    except PenstockError:
        raise
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed", reason="DEADLINE_EXCEEDED") from error
    except Exception as error:
        _log.exception("a request failed")
        raise internal() from error


def no_route(meant: str | None = None) -> NotFound:
    """The error for an unknown path. `meant`: a path that differs from it only by its prefix."""
    advice = f"did you mean {meant}?" if meant else "docs/guide/gateway.md lists the paths"
    return NotFound(f"no such path; {advice}", reason="PATH_NOT_FOUND")
