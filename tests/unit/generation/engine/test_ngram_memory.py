"""The memory of past outputs finds what the definition finds, holds no more than it may, and keeps tenants apart."""

from __future__ import annotations

from factories.engine.fake_engine import engine_config
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.engine.ngram_memory import NgramMemory, TenantMemory

# What the search looks at, as the module says.
MOST_PLACES, LONGEST_MATCH = 16, 16


def naive(kept: list[int | None], token_ids: list[int], fewest: int, max_tokens: int) -> list[int]:
    """Draft by the definition: of the last places of the last 2 tokens the longest match, of equal ones the newest.

    `kept` has None between runs.
    """
    if len(token_ids) < max(fewest, 2):
        return []
    places = [i for i in range(1, len(kept)) if kept[i - 1 : i + 1] == token_ids[-2:]]
    best: tuple[int, int] | None = None
    for place in reversed(places):
        length = 0
        while length < min(len(token_ids), LONGEST_MATCH, place + 1) and kept[place - length] == token_ids[-1 - length]:
            length += 1
        follows = place + 1 < len(kept) and kept[place + 1] is not None
        if follows and length >= fewest and (best is None or length > best[0]):
            best = (length, place)
    if best is None:
        return []
    followers = kept[best[1] + 1 : best[1] + 1 + min(max_tokens, 2 * best[0])]
    return [one for one in followers[: followers.index(None) if None in followers else None] if one is not None]


runs = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=12), max_size=8)


@settings(max_examples=60, deadline=None)
@given(runs=runs, text=st.lists(st.integers(0, 9), max_size=8), fewest=st.integers(2, 4), most=st.integers(1, 9))
def test_a_search_gives_what_the_definition_gives(
    runs: list[list[int]], text: list[int], fewest: int, most: int
) -> None:
    memory = TenantMemory(4096)
    kept: list[int | None] = []
    for run in runs:
        memory.add(run)
        kept += [None, *run]
    # Hashes of ten ids' 2-grams do not meet in so large a table; more places than it looks at are another test.
    if sum(kept[i : i + 2] == text[-2:] for i in range(len(kept))) <= MOST_PLACES:
        assert memory.continuation(text, fewest=fewest, max_tokens=most) == naive(kept, text, fewest, most)


@settings(max_examples=40, deadline=None)
@given(runs=runs, capacity=st.integers(8, 40), text=st.lists(st.integers(0, 9), max_size=6))
def test_what_a_small_memory_finds_is_what_it_holds(runs: list[list[int]], capacity: int, text: list[int]) -> None:
    """Places that were written over are never read, and the newest tokens are there."""
    memory = TenantMemory(capacity)
    kept: list[int | None] = []
    for run in runs:
        memory.add(run)
        kept = [*kept, None, *run][-capacity:]
        assert memory.num_tokens == len(kept)
        found = memory.continuation(text, fewest=2, max_tokens=5)
        assert not found or any(kept[i : i + 2 + len(found)] == [*text[-2:], *found] for i in range(len(kept))), (
            "a continuation that it does not hold"
        )
    if runs:
        last = runs[-1][-capacity + 1 :]
        if len(last) > 2:
            head = last[:2]
            assert memory.continuation(head, fewest=2, max_tokens=1) or last.count(head[0]) > 1 or head == last[-2:]


def test_the_longest_match_wins_and_then_the_newest() -> None:
    memory = TenantMemory(256)
    memory.add([1, 2, 3, 4, 50])
    memory.add([9, 2, 3, 4, 60])
    memory.add([8, 2, 3, 4, 70])
    assert memory.continuation([1, 2, 3, 4], fewest=2, max_tokens=1) == [50]
    assert memory.continuation([7, 2, 3, 4], fewest=2, max_tokens=1) == [70]
    assert memory.continuation([7, 2, 3, 4], fewest=4, max_tokens=1) == []
    assert memory.continuation([5, 6], fewest=2, max_tokens=4) == []


def test_a_short_match_drafts_little_and_nothing_beyond_a_run() -> None:
    memory = TenantMemory(256)
    memory.add([*range(100, 120)])
    memory.add([1, 2])
    assert memory.continuation([101, 102], fewest=2, max_tokens=30) == [103, 104, 105, 106]
    assert memory.continuation([*range(100, 110)], fewest=2, max_tokens=30) == [*range(110, 120)]
    assert memory.continuation([1, 2], fewest=2, max_tokens=5) == []


def test_tenants_do_not_see_each_other_and_the_least_recently_used_leave() -> None:
    now = [0.0]
    memory = NgramMemory(engine_config(ngram_memory_tokens=256, ngram_memory_tenants=2), lambda: now[0])
    one, two = memory.of("one"), memory.of("two")
    assert one is not None
    assert two is not None
    one.add([1, 2, 3, 4])
    assert two.continuation([1, 2], fewest=2, max_tokens=2) == []
    assert memory.of("one") is one
    assert memory.of("three") is not two
    assert memory.of("one") is one, "two was used less recently"
    assert memory.of("two") is not two
    assert memory.num_tenants == 2


def test_a_tenant_is_forgotten_after_its_time() -> None:
    now = [0.0]
    memory = NgramMemory(engine_config(ngram_memory_seconds=10.0), lambda: now[0])
    one = memory.of("one")
    assert one is not None
    one.add([1, 2, 3])
    now[0] = 10.0
    assert memory.of("one") is one
    assert memory.num_tokens == 4
    now[0] = 20.5
    other = memory.of("two")
    assert other is not None
    assert (memory.num_tenants, memory.num_tokens) == (1, 0)
    assert memory.of("one") is not one


def test_without_tenants_nothing_is_remembered() -> None:
    assert NgramMemory(engine_config(ngram_memory_tenants=0), lambda: 0.0).of("one") is None
