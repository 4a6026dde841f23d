"""Lines of a batch's output file and of its error file, in OpenAI's form."""

from __future__ import annotations

import json
import secrets

EXPIRED = ("batch_expired", "the batch's completion_window ended before this line was answered")
CANCELLED = ("batch_cancelled", "the batch was cancelled before this line was answered")
FULL = ("files_full", "the batch ended before this line was answered: its caller's files have no room")


def answered_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an endpoint's answer. `body` is JSON, and goes in as it is."""
    head = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id}
    response = json.dumps({"status_code": status, "request_id": request_id}, ensure_ascii=False)
    return (
        json.dumps(head, ensure_ascii=False)[:-1].encode("utf-8", "replace")
        + b', "response": '
        + response[:-1].encode("utf-8", "replace")
        + b', "body": '
        + body.replace(b"\n", b" ")
        + b'}, "error": null}'
    )


def unanswered_line(custom_id: str, why: tuple[str, str]) -> bytes:
    """Return the line of a request that was never answered. `why`: code and message."""
    code, message = why
    made = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(made, ensure_ascii=False).encode("utf-8", "replace")
