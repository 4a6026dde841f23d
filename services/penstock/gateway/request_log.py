"""One line in the log for each request: its route, its end, and its cost, but no text of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_client import Usage

from penstock.common.logging import get_logger
from penstock.generation.options.table import SECTIONS

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_log = get_logger("penstock.gateway")
# Words of a field's path that belong to Penstock or the API; any other may be the caller's own.
_WORDS = frozenset(
    (
        *(*SECTIONS, *(name for rows in SECTIONS.values() for name in rows)),
        *("body", "model", "adapter", "prompt", "suffix", "messages", "input", "tools", "tool_choice", "role"),
        *("content", "tool_calls", "function", "custom", "name", "arguments", "parameters", "type", "output", "text"),
        *("format", "schema", "response_format", "json_schema", "stream", "n", "documents", "chat_template_kwargs"),
        *("system", "thinking", "items", "continuation", "previous_response_id", "max_tokens", "request_id"),
        *("call_id", "id", "stop", "logprobs", "top_logprobs", "include", "background", "truncation", "conversation"),
    )
)
_SEGMENT = re.compile(r"(\w+)((?:\[\d+\])*)")


@dataclass(slots=True)
class Tokens:
    """Tokens of all prompts and answers of a request."""

    prompt: int = 0
    output: int = 0

    def add(self, usages: Iterable[Usage]) -> None:
        """Add the tokens of some of them."""
        for usage in usages:
            self.prompt += usage.prompt_tokens
            self.output += usage.completion_tokens


def request_log() -> FilteringBoundLogger:
    """Return the logger of requests, made once of what logging is set up to be: making it costs as much as a line that
    is left out."""
    return _log.bind()


def log_request(
    route: str,
    status: int,
    seconds: float,
    *,
    request_id: str,
    reason: str,
    field: str | None,
    tokens: Tokens | None,
    log: FilteringBoundLogger = _log,
) -> None:
    """Write the line of an ended request: a warning if the fault is the server's. `log`: that of `request_log`."""
    write = log.warning if status >= 500 else log.info
    told: dict[str, object] = {}
    if reason:
        told["reason"] = reason
    if field:
        told["field"] = safe_field(field)
    if tokens is not None and (tokens.prompt or tokens.output):
        told |= {"prompt_tokens": tokens.prompt, "output_tokens": tokens.output}
    write("request", request_id=request_id, route=route, status=status, seconds=round(seconds, 3), **told)


def safe_field(field: str) -> str:
    """Return a field's path up to the first word that a caller may have chosen."""
    shown: list[str] = []
    for part in field.split("."):
        found = _SEGMENT.fullmatch(part)
        if found is None or found[1] not in _WORDS:
            break
        shown.append(part)
    return ".".join(shown) or "body"
