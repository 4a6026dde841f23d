"""Files, batches and lines as plain data."""

from __future__ import annotations

import enum
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

# Endpoints that a batch may call.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

_ID = re.compile("(file-|batch_)[0-9a-f]{24}")


class BatchState(enum.StrEnum):
    """States of a batch, in OpenAI's words. The first three and `cancelling` are those of a live one."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


LIVE = (BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.CANCELLING)


class LineState(enum.IntEnum):
    """States of a line. The last two are final: its answer is in the output file or in the error file."""

    WAITING = 0
    TAKEN = 1
    ANSWERED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a caller: what it sent, or the answers of one of its batches. Times are seconds since 1970."""

    file_id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created: float
    expires: float
    # Batch that it has answers of, and their state; None: it has its own bytes.
    batch_id: str | None = None
    state: LineState | None = None


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Reason for which a batch is refused. `line` counts from 1; None: it is about the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Times are seconds since 1970; `ended` is None while it is live."""

    batch_id: str
    owner: str
    input_file: str
    endpoint: str
    window: str
    state: BatchState
    created: float
    expires: float
    began: float | None = None
    cancelling: float | None = None
    ended: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[LineProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class TakenLine:
    """A line that this process answers now."""

    batch_id: str
    owner: str
    endpoint: str
    number: int
    custom_id: str
    input_file: str
    # Of its bytes in the input file.
    place: int
    num_bytes: int
    # SHA-256, in hex, of the secret of the key that it counts for; empty: there is none.
    key_digest: str = ""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A valid line of a batch's file."""

    number: int
    custom_id: str
    place: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """Final answer to a line, in OpenAI's form as bytes of JSON."""

    number: int
    custom_id: str
    has_failed: bool
    answer: bytes


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Numbers of what a store has."""

    files: int = 0
    file_bytes: int = 0
    batches: int = 0
    waiting_lines: int = 0


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return OpenAI's object of a file."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": int(record.created),
        "expires_at": int(record.expires),
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Return OpenAI's object of a batch."""

    def at(state: BatchState) -> int | None:
        return int(record.ended) if record.state is state and record.ended is not None else None

    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": [_problem(one) for one in record.problems]} if record.problems else None,
        "input_file_id": record.input_file,
        "completion_window": record.window,
        "status": record.state.value,
        "output_file_id": record.output_file,
        "error_file_id": record.error_file,
        "created_at": int(record.created),
        "in_progress_at": None if record.began is None else int(record.began),
        "expires_at": int(record.expires),
        "finalizing_at": at(BatchState.COMPLETED),
        "completed_at": at(BatchState.COMPLETED),
        "failed_at": at(BatchState.FAILED),
        "expired_at": at(BatchState.EXPIRED),
        "cancelling_at": None if record.cancelling is None else int(record.cancelling),
        "cancelled_at": at(BatchState.CANCELLED),
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "metadata": record.metadata or None,
    }


def is_id(text: str) -> bool:
    """True for a text that may be the id of a file or a batch; any other need not be looked for."""
    return _ID.fullmatch(text) is not None


def new_file_id() -> str:
    """Make the id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Make the id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def _problem(one: LineProblem) -> dict[str, Any]:
    return {"code": one.code, "message": one.message, "line": one.line, "param": one.param}
