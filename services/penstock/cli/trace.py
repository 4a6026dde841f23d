"""Command `penstock debug trace`: the spans of a request as bars in the terminal, or as a picture (SVG).

It reads what `--tracing-endpoint file:PATH` wrote: lines of OTLP/JSON.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import console, say
from penstock.common.options import option

if TYPE_CHECKING:
    from penstock.cli.flags import Overrides

EPILOG = """docs/guide/observability.md explains the spans.

Examples:

  penstock serve --tracing-endpoint file:/tmp/traces.jsonl

  penstock debug trace /tmp/traces.jsonl

  penstock debug trace /tmp/traces.jsonl --trace-id 4bf92f35 --svg trace.svg"""

GROUP = "Trace"
# Attributes that a line shows, in this order, with the word for them.
_SHOWN = (
    ("gen_ai.usage.input_tokens", "prompt"),
    ("penstock.cached_tokens", "cached"),
    ("gen_ai.usage.output_tokens", "tokens"),
    ("gen_ai.response.finish_reasons", "end"),
    ("server.address", "at"),
    ("penstock.resumed_tokens", "resumed"),
    ("penstock.busy_seconds", "busy"),
    ("error.type", "error"),
)
# Colours of services, by their order; the same in light and dark.
_COLOURS = ("#4a7bd0", "#2f9e77", "#c2762d", "#8a63c9", "#b3475f")
_ERROR = "#d03b3b"
_ROW, _LEFT, _WIDTH, _RIGHT = 24, 280, 520, 300
# A bar takes the rest of the terminal's width beside the other columns.
_BAR_CHARS, _LEAST_BAR_CHARS, _BESIDE_BAR_CHARS = 48, 16, 76


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Configuration: the trace of the file, and the form of the output."""

    trace_id: str | None = option(
        None,
        "Trace to show: the first digits of its id, as in exemplars and log lines; by default the last one.",
        group=GROUP,
        env="PENSTOCK_DEBUG_TRACE_ID",
        metavar="ID",
    )
    svg: str | None = option(
        None, "Write a picture to this file instead.", group=GROUP, env="PENSTOCK_DEBUG_SVG", metavar="FILE"
    )


@dataclass(frozen=True)
class TraceSpan:
    """One span of a file; times in nanoseconds since 1970. `parent` is empty, or names a span that may be elsewhere."""

    trace_id: str
    span_id: str
    parent: str
    name: str
    service: str
    begin: int
    end: int
    attributes: dict[str, Any]
    is_error: bool

    @property
    def facts(self) -> str:
        """Attributes worth a line: numbers and closed sets."""
        shown = []
        for key, word in _SHOWN:
            value = self.attributes.get(key)
            # Requests without resumed ids are the rule.
            if value is None or (key == "penstock.resumed_tokens" and not value):
                continue
            text = (
                "+".join(map(str, value))
                if isinstance(value, list)
                else _milliseconds(value)
                if word == "busy"
                else value
            )
            shown.append(f"{word} {text}")
        return ", ".join(shown)


def run_trace(given: Overrides) -> None:
    """Show a trace of the file `path`. Raises StartupError when the file does not have it."""
    from penstock.common.config import from_env_and_flags
    from penstock.common.errors import StartupError

    path = str(given.pop("path"))
    config = from_env_and_flags(TraceConfig, given)
    spans = choose(read_spans(path), config.trace_id, path)
    if config.svg is None:
        _show(spans)
        return
    try:
        Path(config.svg).write_text(to_svg(spans))
    except OSError as error:
        raise StartupError(f"--svg {config.svg}: {error.strerror}", flag="--svg") from error
    say(f"{config.svg}: trace {spans[0].trace_id}, {len(spans)} spans")


def read_spans(path: str) -> list[TraceSpan]:
    """Read all spans of a file. Raises StartupError naming FILE and a line that is not traces."""
    from penstock.common.errors import StartupError

    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"FILE {path}: {reason}", flag="FILE") from error
    spans: list[TraceSpan] = []
    for number, line in enumerate(lines, 1):
        try:
            spans += _spans(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StartupError(f"FILE {path}: line {number} is not traces in OTLP's JSON form", flag="FILE") from error
    return spans


def _spans(message: dict[str, Any]) -> Iterator[TraceSpan]:
    for resource in message["resourceSpans"]:
        service = _attributes(resource["resource"].get("attributes", ())).get("service.name", "?")
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield TraceSpan(
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent=span.get("parentSpanId", ""),
                    name=str(span["name"]),
                    service=str(service),
                    begin=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span.get("attributes", ())),
                    is_error=span.get("status", {}).get("code") == 2,
                )


def _attributes(pairs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    [(kind, inner)] = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in inner.get("values", ())]
    return int(inner) if kind == "intValue" else inner


def choose(spans: list[TraceSpan], trace_id: str | None, path: str) -> list[TraceSpan]:
    """Return the spans of one trace: the one with an id that begins so, or the last one. Raises StartupError."""
    from penstock.common.errors import StartupError

    if not spans:
        raise StartupError(f"FILE {path}: no traces", flag="FILE")
    if trace_id is None:
        wanted = max(spans, key=lambda span: span.end).trace_id
        return [span for span in spans if span.trace_id == wanted]
    found = {span.trace_id for span in spans if span.trace_id.startswith(trace_id.lower())}
    if len(found) != 1:
        what = "no trace" if not found else f"{len(found)} traces"
        raise StartupError(f"--trace-id {trace_id}: FILE {path} has {what} of this id", flag="--trace-id")
    return [span for span in spans if span.trace_id in found]


def in_tree(spans: list[TraceSpan]) -> list[tuple[int, TraceSpan]]:
    """Return (depth, span) with children below their parents, in order of their start."""
    known = {span.span_id for span in spans}
    below: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        below[span.parent if span.parent in known else ""].append(span)
    ordered: list[tuple[int, TraceSpan]] = []
    waiting = [(0, span) for span in reversed(below[""])]
    while waiting:
        depth, span = waiting.pop()
        ordered.append((depth, span))
        waiting += [(depth + 1, child) for child in reversed(below[span.span_id])]
    return ordered


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _length(span: TraceSpan) -> str:
    return _milliseconds((span.end - span.begin) / 1e9)


def _show(spans: list[TraceSpan]) -> None:
    from rich.markup import escape as plain
    from rich.table import Table

    tree = in_tree(spans)
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    chars = max(_LEAST_BAR_CHARS, min(_BAR_CHARS, console().width - _BESIDE_BAR_CHARS))
    table = Table(box=None, pad_edge=False)
    for heading in ("span", "service", "time", ""):
        table.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
    table.add_column("", overflow="fold")
    for depth, span in tree:
        style = "red" if span.is_error else "cyan"
        bar = _bar(span, first, last, chars)
        name, service = (
            plain("  " * depth + span.name.rpartition("/")[2]),
            plain(span.service.removeprefix("penstock-")),
        )
        table.add_row(name, service, _length(span), f"[{style}]{bar}[/]", plain(span.facts))
    say(f"trace {spans[0].trace_id}: {len(spans)} spans, {_milliseconds((last - first) / 1e9)}")
    console().print(table)


def _bar(span: TraceSpan, first: int, last: int, chars: int) -> str:
    scale = chars / max(1, last - first)
    begin = min(chars - 1, int((span.begin - first) * scale))
    length = max(1, round((span.end - span.begin) * scale))
    return " " * begin + "━" * min(length, chars - begin)


def _short(name: str) -> str:
    return re.sub(r"^penstock\.v1\.", "", name)


def to_svg(spans: list[TraceSpan]) -> str:
    """Draw a trace: a row for each span, a colour for each service. It is readable on light and dark pages."""
    tree = in_tree(spans)
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    services = list(dict.fromkeys(span.service for _, span in tree))
    colours = {service: _COLOURS[place % len(_COLOURS)] for place, service in enumerate(services)}
    height, width = _ROW * (len(tree) + 3), _LEFT + _WIDTH + _RIGHT
    scale = _WIDTH / max(1, last - first)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        '  font-family="sans-serif" font-size="13">',
        "<style>text{fill:#1f2328}.faint{fill:#59636e}.line{stroke:#59636e;stroke-opacity:.25}.page{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9aa5b1}.page{fill:#14181d}}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    at = 12
    for service in services:
        parts.append(f'<rect x="{at}" y="9" width="11" height="11" rx="2" fill="{colours[service]}"/>')
        parts.append(f'<text x="{at + 17}" y="19">{escape(service)}</text>')
        at += 40 + 8 * len(service)
    for step in range(5):
        x = _LEFT + _WIDTH * step / 4
        time = _milliseconds((last - first) * step / 4 / 1e9)
        parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{_ROW * 2}" y2="{height - 8}"/>')
        parts.append(
            f'<text class="faint" font-size="11" text-anchor="middle" x="{x:.1f}" y="{_ROW * 2 - 6}">{time}</text>'
        )
    for row, (depth, span) in enumerate(tree):
        y = _ROW * (row + 2)
        x, long = _LEFT + (span.begin - first) * scale, max(2.0, (span.end - span.begin) * scale)
        fill = _ERROR if span.is_error else colours[span.service]
        told = f"{_length(span)}  {span.facts}".rstrip()
        parts.append(f'<text x="{12 + 14 * depth}" y="{y + 16}">{escape(_short(span.name))}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y + 5}" width="{long:.1f}" height="14" rx="2" fill="{fill}"/>')
        right = max(x + long, 0) + 6
        parts.append(f'<text class="faint" font-size="11" x="{right:.1f}" y="{y + 16}">{escape(told)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
