"""Errors that reach a user, and their conversion to a gRPC status with google.rpc details.

PenstockError
 ├─ InvalidArgument       bad field, unsupported combination
 ├─ NotFound              unknown model or adapter
 ├─ ResourceExhausted     queue full, slow reader, pool too small
 ├─ FailedPrecondition    wrong mode, fingerprint mismatch
 ├─ Unavailable           starting, draining, no backend (before the first token only)
 ├─ Aborted               stream lost after tokens were sent
 ├─ DeadlineExceeded
 ├─ Cancelled
 ├─ Unauthenticated
 ├─ PermissionDenied      a valid key that may not do this
 ├─ Unimplemented         a peer of another release lacks the RPC
 └─ Internal              anything else; carries a reason, never an exception's text
StartupError              a process cannot start: names the flag to change
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import ClassVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "penstock"
# Longest wait that an error asks for: a peer's figures may add up to anything.
_MOST_RETRY_SECONDS = 86_400.0
# Longest text of an error on the wire: all its texts together must fit the 8 KiB of trailers that peers accept.
_MOST_TEXT_BYTES = 1024
# Longest message of a process that cannot start.
_MOST_CHARS = 2000
# Lone surrogates and control characters of a terminal.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _printable(text: str) -> str:
    """Return a text that can be written anywhere: files may hold lone surrogates, and megabytes."""
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]}…"
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _sendable(text: str) -> str:
    """Return a text that a message and trailers can hold: it may have a caller's names, of any length."""
    text = _printable(text)
    if text.isascii() and len(text) <= _MOST_TEXT_BYTES:
        return text
    raw = text.encode()
    return text if len(raw) <= _MOST_TEXT_BYTES else raw[: _MOST_TEXT_BYTES - 3].decode(errors="ignore") + "…"


class PenstockError(Exception):
    """Base of every error that a caller sees. `message` never has a user's text or ids, or an exception's internals."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        field: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Make it. `reason` is UPPER_SNAKE_CASE and stable; `field` is a proto field path such as `config.top_p`."""
        message = _sendable(message)
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field = None if field is None else _sendable(field)
        # The order matters for NaN.
        self.retry_after_seconds = (
            None if retry_after_seconds is None else min(max(0.0, retry_after_seconds), _MOST_RETRY_SECONDS)
        )


class InvalidArgument(PenstockError):
    """A field is wrong, alone or together with others. The text names the allowed values, never the given one."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, description: str, *, reason: str = "INVALID_FIELD") -> None:
        super().__init__(f"{field}: {description}", reason=reason, field=field)
        self.description = _sendable(description)


class NotFound(PenstockError):
    """An unknown model or adapter."""

    code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(PenstockError):
    """A bound of the configuration is reached; `retry_after_seconds` when waiting helps."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(PenstockError):
    """The process cannot do this in its present configuration."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(PenstockError):
    """The service cannot answer now, and nothing was emitted yet: a retry is safe."""

    code = grpc.StatusCode.UNAVAILABLE


class Aborted(PenstockError):
    """A stream could not continue after it had emitted tokens; metadata holds last_seq."""

    code = grpc.StatusCode.ABORTED


class DeadlineExceeded(PenstockError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(PenstockError):
    """The caller or the operator cancelled the request."""

    code = grpc.StatusCode.CANCELLED


class Unauthenticated(PenstockError):
    """No or bad credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(PenstockError):
    """The caller is known, and may not make this call, or not for this model."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(PenstockError):
    """The called process lacks the RPC: it is of another release, or another service."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(PenstockError):
    """A fault of Penstock. The cause is in the log, under the request id."""

    code = grpc.StatusCode.INTERNAL


class StartupError(Exception):
    """A process cannot start. `flag` is what to change (e.g. `--kv-memory`); printed as one line, exit code 2."""

    def __init__(self, message: str, *, flag: str | None = None) -> None:
        message = _printable(message)
        super().__init__(message)
        self.message = message
        self.flag = flag


class DoesNotFit(StartupError):
    """A model, or its KV pool, is larger than the memory that is free."""


_BY_CODE: dict[grpc.StatusCode, type[PenstockError]] = {
    kind.code: kind
    for kind in (
        NotFound,
        ResourceExhausted,
        FailedPrecondition,
        Unavailable,
        Aborted,
        DeadlineExceeded,
        Cancelled,
        Unauthenticated,
        PermissionDenied,
        Unimplemented,
        Internal,
    )
}
CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: PenstockError) -> status_pb2.Status:
    """Make the google.rpc.Status of `error`: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    details: list[any_pb2.Any] = []

    def add(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.field is not None:
        description = error.description if isinstance(error, InvalidArgument) else error.message
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


# Texts of grpc, and of Penstock's transport, about messages larger than either side accepts.
_LARGER = "message larger than max"


def from_status(status: status_pb2.Status) -> PenstockError:
    """Invert `to_status`; a status without ErrorInfo gets a reason from its code or from grpc's text, or UNKNOWN."""
    code = CODE_BY_NUMBER.get(status.code, grpc.StatusCode.INTERNAL)
    # gRPC itself answers calls of unknown methods, without an ErrorInfo.
    reason = "UNIMPLEMENTED" if code is grpc.StatusCode.UNIMPLEMENTED else "UNKNOWN"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _LARGER in status.message:
        reason = "MESSAGE_TOO_LARGE"
    metadata: dict[str, str] = {}
    field, description, retry = None, "", None
    for packed in status.details:
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            if bad.field_violations:
                field, description = bad.field_violations[0].field, bad.field_violations[0].description
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info_retry = error_details_pb2.RetryInfo()
            packed.Unpack(info_retry)
            retry = info_retry.retry_delay.ToNanoseconds() / 1e9
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(field or "request", description or status.message, reason=reason)
    kind = _BY_CODE.get(code, Internal)
    return kind(status.message, reason=reason, metadata=metadata, field=field, retry_after_seconds=retry)


def from_rpc_error(error: grpc.RpcError) -> PenstockError:
    """Make the error of a call that this process made and that failed, with the server's details if it sent any."""
    call = cast("grpc.Call", error)  # every RpcError that a call raises is also a grpc.Call
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            # A proxy, or a peer that is not Penstock, may send any bytes: then the bare status is used.
            with contextlib.suppress(DecodeError):
                return from_status(status_pb2.Status.FromString(value))
    return from_status(status_pb2.Status(code=call.code().value[0], message=call.details() or ""))


def trailing_metadata(error: PenstockError) -> tuple[tuple[str, str | bytes], ...]:
    """Make trailers with the details, and with the pushback that gRPC clients obey in their retries."""
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", to_status(error).SerializeToString())]
    if error.retry_after_seconds is not None:
        trailers.append(("grpc-retry-pushback-ms", str(int(error.retry_after_seconds * 1000))))
    elif isinstance(error, ResourceExhausted):
        # gRPC's value for "do not retry": a request that was too large or too slow will be so again.
        trailers.append(("grpc-retry-pushback-ms", "-1"))
    return tuple(trailers)
