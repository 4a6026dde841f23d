"""Errors in OpenAI's shape, with the status that OpenAI's clients act upon."""

from __future__ import annotations

import pytest
from penstock.common.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from penstock.gateway.http_errors import HttpError, error_body, error_headers, http_name, status_of

ERRORS: list[tuple[PenstockError, int, str, str]] = [
    (InvalidArgument("config.top_p", "must be in [0, 1]"), 400, "invalid_request_error", "invalid_field"),
    (InvalidArgument("prompt", "x", reason="PROMPT_TOO_LONG"), 400, "invalid_request_error", "context_length_exceeded"),
    (FailedPrecondition("x", reason="NO_ADAPTER_ROOT"), 400, "invalid_request_error", "no_adapter_root"),
    (Unauthenticated("x", reason="UNAUTHENTICATED"), 401, "authentication_error", "invalid_api_key"),
    (NotFound("x", reason="MODEL_NOT_FOUND", field="model"), 404, "not_found_error", "model_not_found"),
    (ResourceExhausted("x", reason="QUEUE_FULL"), 429, "rate_limit_error", "queue_full"),
    (ResourceExhausted("x", reason="EXCEEDS_KV_POOL"), 413, "invalid_request_error", "exceeds_kv_pool"),
    (ResourceExhausted("x", reason="RESPONSE_TOO_LARGE"), 413, "invalid_request_error", "response_too_large"),
    (ResourceExhausted("x", reason="MESSAGE_TOO_LARGE"), 413, "invalid_request_error", "message_too_large"),
    (Internal("x", reason="INTERNAL"), 500, "server_error", "internal"),
    (Aborted("x", reason="BACKEND_LOST"), 500, "server_error", "backend_lost"),
    (Unimplemented("x", reason="UNIMPLEMENTED"), 501, "server_error", "unimplemented"),
    (Unavailable("x", reason="NO_BACKEND"), 503, "service_unavailable_error", "no_backend"),
    (DeadlineExceeded("x", reason="DEADLINE_EXCEEDED"), 504, "timeout_error", "deadline_exceeded"),
    (HttpError(413, "x", reason="BODY_TOO_LARGE"), 413, "invalid_request_error", "body_too_large"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS, ids=[type(row[0]).__name__ for row in ERRORS])
def test_status_type_and_code(error: PenstockError, status: int, kind: str, code: str) -> None:
    body = error_body(error, {})["error"]
    assert (status_of(error), body["type"], body["code"]) == (status, kind, code)
    assert body["reason"] == error.reason


def test_a_field_is_named_as_the_request_spelt_it() -> None:
    names = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
    assert http_name("config.max_new_tokens", names) == "max_tokens"
    assert http_name("stop.stop_strings[1]", names) == "stop[1]"
    assert http_name("messages[0].content[1]", names) == "messages[0].content[1]"
    body = error_body(InvalidArgument("config.max_new_tokens", "must be at least 1"), names)["error"]
    assert (body["param"], body["field"]) == ("max_tokens", "config.max_new_tokens")
    assert body["message"] == "max_tokens: must be at least 1"


def test_headers_say_when_to_try_again() -> None:
    assert error_headers(ResourceExhausted("x", reason="QUEUE_FULL", retry_after_seconds=0.2)) == [
        (b"retry-after", b"1")
    ]
    assert error_headers(ResourceExhausted("x", reason="RESPONSE_TOO_LARGE")) == [(b"x-should-retry", b"false")]
    assert error_headers(Unauthenticated("x", reason="UNAUTHENTICATED")) == [(b"www-authenticate", b"Bearer")]
