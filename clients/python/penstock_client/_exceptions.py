"""The client's errors.

PenstockError            code, message, reason, field, metadata, retry_after_seconds
 ├─ InvalidArgument      a field of the request is wrong; `.field` names it
 ├─ NotFound             unknown model or adapter
 ├─ ResourceExhausted    overloaded; `.retry_after_seconds` when waiting helps
 ├─ FailedPrecondition   the server cannot do this in its configuration
 ├─ Unavailable          nothing was emitted; retried already, as RetryConfig says
 ├─ Aborted              the stream was lost after deltas had arrived
 ├─ DeadlineExceeded     TimeoutConfig or the call's `timeout` passed
 ├─ Cancelled            this side gave up
 ├─ Unauthenticated      no or bad token
 ├─ PermissionDenied     the key may not do this
 ├─ Unimplemented        the server's release has no such call
 └─ Internal             the server's fault, or a stream that broke the protocol
"""

from __future__ import annotations

import grpc
from penstock.common.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)

__all__ = [
    "Aborted",
    "Cancelled",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PenstockError",
    "PermissionDenied",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "stream_error",
    "truncated_stream",
]

# gRPC's texts when a server accepts a connection and closes it without a word.
_NO_CONNECTION, _HUNG_UP = "failed to connect to all addresses", "Socket closed"
# gRPC's texts when no server was reached, a proxy's refusal among them.
_UNREACHED = (_NO_CONNECTION, "DNS resolution failed", "HTTP proxy", _HUNG_UP)
_TLS_HINT = "a server with TLS closes connections without TLS or a client certificate: see ClientConfig.tls"


def stream_error(error: grpc.RpcError, last_seq: int | None, through: str = "") -> PenstockError:
    """Return the error of a broken stream: Unavailable when it was lost before anything arrived, Aborted after a
    delta. `through`: text about the proxy on the way, for an error without an answer."""
    mapped = from_rpc_error(error)
    if isinstance(mapped, Unavailable):
        if last_seq is not None:
            metadata = {**mapped.metadata, "last_seq": str(last_seq)}
            return Aborted(mapped.message, reason=mapped.reason, metadata=metadata)
        if through and any(sign in mapped.message for sign in _UNREACHED):
            return Unavailable(f"{mapped.message}; {through}", reason="NOT_CONNECTED")
        if mapped.message.startswith(_NO_CONNECTION) and mapped.message.endswith(_HUNG_UP):
            return Unavailable(f"{mapped.message}; {_TLS_HINT}", reason="NOT_CONNECTED")
    return mapped


def truncated_stream() -> Internal:
    """Return the error of a stream that ended OK without Finished, which is never accepted."""
    return Internal("the stream ended without Finished", reason="TRUNCATED_STREAM")
