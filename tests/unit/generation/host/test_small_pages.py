"""Memory in small pages first: how much of it is taken, and that its content stays when it gets large ones."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from penstock.generation.host.small_pages import SmallPages, has_small_pages

LARGE = 1 << 21

pytestmark = pytest.mark.skipif(not has_small_pages(), reason="this system cannot make large pages of small ones")


def mapping_of(address: int) -> dict[str, int]:
    """Return the bytes by name of the mapping with this address."""
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        begin, end = (int(place, 16) for place in text.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    raise LookupError


def wait_for_moves() -> None:
    for thread in threading.enumerate():
        if thread.name == "large-pages":
            thread.join()


def test_a_few_bytes_here_and_there_take_little_until_large_pages_are_wanted() -> None:
    pages = SmallPages(64 * LARGE)
    data = np.frombuffer(pages.memory, np.uint8)
    assert len(data) == 64 * LARGE
    assert data.ctypes.data % LARGE == 0
    places = range(0, 64, 2)
    for place in places:
        data[place * LARGE + 5000] = place + 1
    before = mapping_of(data.ctypes.data)
    assert (before["Rss"], before["AnonHugePages"]) == (len(places) * 4096, 0)
    pages.leave((place * LARGE + 1000, place * LARGE + 9000) for place in places)
    wait_for_moves()
    assert [data[place * LARGE + 5000] for place in places] == [place + 1 for place in places]
    assert np.count_nonzero(data[: 4 * LARGE]) == 2
    after = mapping_of(data.ctypes.data)
    if not after["AnonHugePages"]:
        pytest.skip("this system has no large page to give now")
    # What the system has left.
    assert after["AnonHugePages"] % LARGE == 0
    assert after["Rss"] <= len(places) * LARGE


def test_what_is_written_meanwhile_stays() -> None:
    """Steps go on while pages move."""
    pages = SmallPages(32 * LARGE)
    numbers = np.frombuffer(pages.memory, np.int64)
    numbers[::64] = 1
    pages.leave([(0, 32 * LARGE)])
    for _ in range(20):
        numbers[::64] += 1
    wait_for_moves()
    assert (numbers[::64] == 21).all()
    assert numbers.sum() == 21 * (len(numbers) // 64)


def test_the_first_and_the_last_byte_may_move() -> None:
    pages = SmallPages(LARGE + 1)
    data = np.frombuffer(pages.memory, np.uint8)
    data[0], data[-1] = 3, 4
    pages.leave([(0, 1), (LARGE, LARGE + 1), (LARGE, LARGE + 1)])
    wait_for_moves()
    assert (data[0], data[-1]) == (3, 4)


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError, match="cannot map"):
        SmallPages(1 << 62)
