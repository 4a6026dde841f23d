"""Sizes and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.units import format_duration, format_size, parse_duration, parse_size, parse_size_or_auto


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("1B", 1),
        ("1k", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("1.5gib", 3 << 29),
        ("1TB", 10**12),
        (" 4 MiB ", 4 << 20),
    ],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 PiB", "2GiBs", "1,5GiB", "auto", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


def test_auto_stands_for_none() -> None:
    assert parse_size_or_auto("auto") is None
    assert parse_size_or_auto("AUTO") is None
    assert parse_size_or_auto("1GiB") == 1 << 30


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("250ms", 0.25), ("5m", 300), ("1h", 3600), ("0.5s", 0.5)]
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "five"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_formatted_size_reads_back_within_its_rounding(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (10, "10 B"),
        (2048, "2 KiB"),
        (3 << 20, "3 MiB"),
        (1 << 31, "2 GiB"),
        (1023 << 10, "1 MiB"),
        (1020 << 20, "1 GiB"),
        (999 << 20, "999 MiB"),
        (int(12.34 * 2**30), "12.3 GiB"),
        (int(8.01 * 2**20), "8.01 MiB"),
        (1 << 50, "1024 TiB"),
        (-3 << 20, "-3 MiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_durations_are_shown_in_the_unit_that_fits() -> None:
    assert [format_duration(seconds) for seconds in (0.00085, 0.0123, 1.25)] == ["850 µs", "12.3 ms", "1.25 s"]
