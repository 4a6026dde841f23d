"""Rows of benchmarks/wire.py as a table and as curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

COLUMNS = (
    *("variant", "load", "window", "streams", "tok/s", "merged", "TTFT p50 / p99 ms", "between p50 / p99 ms"),
    *("router + tokenizer (or gateway) µs a token", "backend, client µs", "RSS MB", "failed"),
)
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8540", "#8a5fbf", "#c77d0a", "#5c6770")
_WIDTH, _HEIGHT, _LEFT, _TOP = 380, 240, 60, 40


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a row."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cpu = row["cpu_us_per_token"]
        cells = (
            row["variant"],
            row["mode"],
            row["window"] or "free",
            row["streams"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['merged_share']:.1%}",
            f"{row['ttft_p50_ms']:.1f} / {row['ttft_p99_ms']:.1f}",
            f"{row['itl_p50_ms']:.2f} / {row['itl_p99_ms']:.2f}",
            _sum(_serving(row)),
            f"{cpu['backend']:.1f}, {cpu['client']:.1f}",
            " + ".join(f"{value:.0f}" for value in row["rss_mb"].values()),
            row["failed"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _serving(row: dict[str, Any]) -> list[float]:
    """µs a token of each process between backend and client."""
    return [float(spent) for name, spent in row["cpu_us_per_token"].items() if name not in ("backend", "client")]


def _sum(parts: list[float]) -> str:
    text = " + ".join(f"{part:.1f}" for part in parts)
    return text if len(parts) == 1 else f"{text} = {sum(parts):.1f}"


def _cost(row: dict[str, Any]) -> float:
    return sum(_serving(row))


def plot(rows: list[dict[str, Any]]) -> str:
    """An SVG: tokens a second, processor time a token and time to first token over the number of streams."""
    panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("tokens a second", lambda row: float(row["tokens_per_second"])),
        ("µs of router and tokenizer (or gateway) a token", _cost),
        ("time to first token, p50 ms", lambda row: float(row["ttft_p50_ms"])),
    ]
    series = sorted({(str(row["mode"]), str(row["variant"])) for row in rows})
    parts = [_panel(place, title, value, rows, series) for place, (title, value) in enumerate(panels)]
    width, height = len(panels) * (_WIDTH + _LEFT + 20), _TOP + _HEIGHT + 40 + 18 * len(series)
    for place, (mode, variant) in enumerate(series):
        parts.append(_text(_LEFT, _TOP + _HEIGHT + 50 + 18 * place, f"{mode}, {variant}", _COLOURS[place % 6]))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, colour: str = "#222", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def _panel(
    place: int,
    title: str,
    value: Callable[[dict[str, Any]], float],
    rows: list[dict[str, Any]],
    series: list[tuple[str, str]],
) -> str:
    """Both axes logarithmic."""
    left = _LEFT + place * (_WIDTH + _LEFT + 20)
    steps = sorted({row["streams"] for row in rows})
    low = math.floor(math.log10(min(value(row) for row in rows)))
    high = math.ceil(math.log10(max(value(row) for row in rows)) + 1e-9)
    span = max(1e-9, math.log(steps[-1] / steps[0]))

    def x(streams: int) -> float:
        return left + _WIDTH * (math.log(streams / steps[0]) / span if len(steps) > 1 else 0.5)

    def y(number: float) -> float:
        return _TOP + _HEIGHT * (1 - (math.log10(number) - low) / (high - low))

    parts = [_text(left, _TOP - 14, title)]
    for power in range(low, high + 1):
        parts.append(f'<path d="M{left} {y(10**power):.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y(10**power) + 4, f"{10.0**power:g}", anchor="end"))
    parts += [_text(x(streams), _TOP + _HEIGHT + 18, str(streams), anchor="middle") for streams in steps]
    for number, (mode, variant) in enumerate(series):
        own = sorted((r for r in rows if (r["mode"], r["variant"]) == (mode, variant)), key=lambda r: r["streams"])
        points = " ".join(f"{x(row['streams']):.1f},{y(value(row)):.1f}" for row in own)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join(parts)
