"""Numbers of a client's streams: odd, rising, and none that was left out comes later."""

from __future__ import annotations

import pytest
from penstock.http2.frames import Violation
from penstock.http2.stream_numbers import StreamNumbers


def test_numbers_rise() -> None:
    numbers = StreamNumbers()
    assert [numbers.begin(stream) for stream in (1, 3, 9, 3)] == [True, True, True, False]
    assert numbers.last == 9


@pytest.mark.parametrize("stream", [2, 5, 7, 10])
def test_even_numbers_and_those_that_were_left_out_are_wrong(stream: int) -> None:
    numbers = StreamNumbers()
    for begun in (1, 3, 9):
        numbers.begin(begun)
    with pytest.raises(Violation, match="number is wrong"):
        numbers.begin(stream)


def test_frames_of_streams_that_never_began_are_wrong() -> None:
    numbers = StreamNumbers()
    numbers.begin(5)
    numbers.require_begun(3)
    for stream in (2, 7):
        with pytest.raises(Violation, match="no stream"):
            numbers.require_begun(stream)


def test_streams_that_ended_here_first_are_remembered_within_bounds() -> None:
    numbers = StreamNumbers()
    for stream in range(1, 4001, 2):
        numbers.cut_off(stream)
    assert not numbers.is_cut_off(1)
    assert numbers.is_cut_off(3999)
    assert len(numbers._cut_off) == 1000
    numbers.end(3999)
    assert not numbers.is_cut_off(3999)
