"""Sizes and durations in the form that people write: `2GiB`, `512MB`, `30s`, `250ms`."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
AUTO = "auto"


def parse_size(text: str) -> int:
    """Parse bytes: `2GiB` and `2Gi` count by 1024, `2GB` and `2G` by 1000, bare numbers by 1. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 512MiB or 2GiB")
    unit = match[2].lower()
    power = "kmgt".find(unit[:1]) + 1 if unit[:1] and unit[:1] in "kmgt" else 0
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** power)


def parse_size_or_auto(text: str) -> int | None:
    """Parse as `parse_size`; `auto` is None."""
    return None if text.strip().lower() == AUTO else parse_size(text)


def parse_duration(text: str) -> float:
    """Parse seconds: `30`, `30s`, `250ms`, `5m`, `1h`. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a duration such as 30s, 250ms or 5m")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_size(size: int) -> str:
    """Format bytes as `1.5 GiB`, `260 MiB` or `2 KiB`: for people, not for parsing back.

    Three digits if the unit has that many, never an exponent, and 1 GiB rather than 1020 MiB.
    """
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # From this value on it would show as 1000 or more.
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds as `850 µs`, `12.3 ms` or `1.25 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
