"""Output of one streamed answer to the terminal, with its statistics."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from penstock.cli.console import console
from penstock.common.units import format_duration

if TYPE_CHECKING:
    from penstock_client import Completion, Delta, Stream, Timings

    from penstock.generator.stream import TextStream

STAGES = (
    ("template", "template_seconds"),
    ("tokenize", "tokenize_seconds"),
    ("route", "route_seconds"),
    ("queue", "queue_seconds"),
    ("prefill", "prefill_seconds"),
    ("decode", "decode_seconds"),
    ("detokenize", "detokenize_seconds"),
    ("time to first token", "time_to_first_token_seconds"),
    ("total", "total_seconds"),
)


def stream_answer(stream: Stream | TextStream) -> Completion | None:
    """Write deltas as they come. With several sequences only the first streams; the others follow, one on each line.

    Ctrl-C cancels the request; then the result is None. Raises PenstockError.
    """
    others: dict[int, list[Delta]] = {}
    with stream:
        try:
            for delta in stream:
                if delta.index:
                    others.setdefault(delta.index, []).append(delta)
                else:
                    _write(delta)
        except KeyboardInterrupt:
            _end_line()
            console().print("(stopped)", style="dim")
            return None
        completion = stream.result()
    _end_line()
    for _, deltas in sorted(others.items()):
        for delta in deltas:
            _write(delta)
        _end_line()
    return completion


def _write(delta: Delta) -> None:
    if delta.reasoning:
        console().print(delta.reasoning, end="", style="dim", markup=False, soft_wrap=True)
    if delta.text:
        sys.stdout.write(delta.text)
    for call in delta.tool_calls:
        console().print(f"{call.name}{call.arguments}", end="", style="cyan", markup=False, soft_wrap=True)
    sys.stdout.flush()


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def stats_line(completion: Completion) -> str:
    """Format counts, time to first token, speed and finish reason in one line."""
    usage, timings = completion.usage, completion.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} tokens"]
    if timings.time_to_first_token_seconds is not None:
        parts.append(f"first after {format_duration(timings.time_to_first_token_seconds)}")
    # Beams all come at the end: there is no rate.
    streamed = completion.finished.last_seq + 1 > len(completion.choices)
    if streamed and timings.decode_seconds and usage.completion_tokens > 1:
        parts.append(f"{(usage.completion_tokens - 1) / timings.decode_seconds:.0f} tok/s")
    drafted = usage.accepted_draft_tokens + usage.rejected_draft_tokens
    if drafted:
        parts.append(f"{usage.accepted_draft_tokens} of {drafted} drafts accepted")
    reasons = {choice.finish_reason for choice in completion.choices if choice.finish_reason}
    return " · ".join([*parts, *sorted(reasons)])


def warnings_of(completion: Completion) -> list[str]:
    """Return the server's warnings."""
    return [f"warning: {text}" for text in completion.started.warnings]


def stage_timings(timings: Timings) -> list[tuple[str, str]]:
    """Return (stage, time) of every stage that ran, in order."""
    ran = [(label, getattr(timings, name)) for label, name in STAGES]
    return [(label, format_duration(seconds)) for label, seconds in ran if seconds is not None]


def allow_any_text() -> None:
    """Make a terminal show a replacement for a character that it cannot show, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
