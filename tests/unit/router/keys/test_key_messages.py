"""Keys as operators see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from factories.servers.key_files import write_keys
from penstock.router.keys.key_messages import keys_facts
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.ledger_tables import DayUsage


class CountedUsage(list[DayUsage]):
    """Days that count how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[DayUsage]:
        self.reads += 1
        return super().__iter__()


def test_each_key_has_its_own_days_and_they_are_read_once(tmp_path: Path) -> None:
    ring = KeyRing(write_keys(tmp_path / "keys.toml", a={}, b={}, c={}), 9)
    usage = CountedUsage(
        [DayUsage(label=label, day=day, answers=day) for label, day in (("a", 1), ("a", 2), ("c", 2), ("gone", 1))]
    )
    facts = keys_facts(ring.keys, usage, ring)
    assert {one.label: [day.day for day in one.usage] for one in facts} == {"a": [1, 2], "b": [], "c": [2]}
    assert usage.reads == 1, "a year of a thousand keys is long"
