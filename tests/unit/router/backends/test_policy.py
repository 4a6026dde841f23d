"""Choice of a backend: session, then cached prefix, then load; affinity yields to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from penstock.router.backends.candidate_list import CandidateList
from penstock.router.backends.policy import Policy, PolicyConfig
from penstock.router.backends.prefix_index import BlockNames, PrefixIndex, routing_hashes


@dataclass
class FakeLoad:
    """A load with knobs."""

    requests: float = 0.0
    idle_only: float = 0.0
    is_full: bool = False
    kv_pressure: float = 0.0

    def standing(self, *, is_idle_only: bool) -> float | None:
        return None if self.is_full else self.requests - (0.0 if is_idle_only else self.idle_only)


@dataclass
class FakeBackend:
    """A candidate with knobs."""

    key: str
    load: FakeLoad = field(default_factory=FakeLoad)
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(1000))
    is_own: bool = True

    def match(self, hashes: Sequence[int]) -> int:
        return self.prefixes.match(hashes if self.is_own or not isinstance(hashes, BlockNames) else hashes.plain)


PROMPT = routing_hashes(range(64), 16, "salt", 100)


def policy(**settings: float) -> Policy[FakeBackend]:
    return Policy(PolicyConfig(slack=settings.get("slack", 4.0), factor=settings.get("factor", 1.5), max_sessions=4))


def pair() -> tuple[FakeBackend, FakeBackend]:
    return FakeBackend("a"), FakeBackend("b")


def test_least_loaded_without_knowledge() -> None:
    a, b = pair()
    a.load.requests = 3
    assert policy().choose([a, b], PROMPT) is b


def test_requests_of_idle_capacity_count_for_their_like_alone() -> None:
    a, b = pair()
    a.load.requests, a.load.idle_only, b.load.requests = 16, 16, 1
    chooser = policy()
    assert chooser.choose([a, b], PROMPT) is a
    assert chooser.choose([a, b], PROMPT, is_idle_only=True) is b


def test_equals_take_turns() -> None:
    a, b = pair()
    chooser = policy()
    assert {chooser.choose([a, b], []).key for _ in range(2)} == {"a", "b"}  # type: ignore[union-attr]


def test_longest_cached_prefix_wins_over_a_little_load() -> None:
    a, b = pair()
    a.prefixes.add(PROMPT)
    b.prefixes.add(PROMPT[:1])
    a.load.requests = 3
    assert policy().choose([a, b], PROMPT) is a


def test_those_that_have_as_much_of_a_prompt_take_turns() -> None:
    a, b = pair()
    for one in (a, b):
        one.prefixes.add(PROMPT)
    chooser = policy()
    # As of a backend that was ejected, recovered, and got its probes.
    chosen = [chooser.choose([a, b], PROMPT).key for _ in range(50)]  # type: ignore[union-attr]
    assert (chosen.count("a"), chosen.count("b")) == (25, 25)
    a.load.requests = 1
    assert chooser.choose([a, b], PROMPT) is b


def test_affinity_yields_when_its_backend_is_busy() -> None:
    a, b = pair()
    a.prefixes.add(PROMPT)
    a.load.requests = 5
    assert policy().choose([a, b], PROMPT) is b


def test_affinity_yields_when_kv_is_nearly_gone() -> None:
    a, b = pair()
    a.prefixes.add(PROMPT)
    a.load.kv_pressure = 0.95
    assert policy().choose([a, b], PROMPT) is b


def test_one_hot_prefix_spreads_over_all_backends() -> None:
    backends = [FakeBackend(name) for name in "abc"]
    chooser = policy()
    for _ in range(60):
        chosen = chooser.choose(backends, PROMPT)
        assert chosen is not None
        chosen.load.requests += 1
        chosen.prefixes.add(PROMPT)
    assert min(backend.load.requests for backend in backends) >= 10


def test_session_sticks_to_its_backend() -> None:
    a, b = pair()
    chooser = policy()
    first = chooser.choose([a, b], [], session="s")
    assert first is not None
    first.load.requests = 3
    assert chooser.choose([a, b], [], session="s") is first


def test_session_moves_when_its_backend_is_full_or_gone() -> None:
    a, b = pair()
    chooser = policy()
    first = chooser.choose([a, b], [], session="s")
    assert first is not None
    other = b if first is a else a
    first.load.is_full = True
    assert chooser.choose([a, b], [], session="s") is other


def test_sessions_are_bounded() -> None:
    a, b = pair()
    chooser = policy()
    first = chooser.choose([a], [], session="0")
    for index in range(1, 6):
        chooser.choose([b], [], session=str(index))
    assert first is a
    a.load.requests = 1
    assert chooser.choose([a, b], [], session="0") is b


def test_backends_to_avoid_are_the_last_resort() -> None:
    a, b = pair()
    b.load.requests = 100
    assert policy().choose([a, b], [], avoid={"a"}) is b
    assert policy().choose([a], [], avoid={"a"}) is a


def test_nowhere_when_all_are_full() -> None:
    assert policy().choose([FakeBackend("a", FakeLoad(is_full=True))], []) is None


ids = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=80)


@given(ids, ids, st.integers(min_value=1, max_value=16))
def test_hashes_agree_exactly_on_the_common_blocks(left: list[int], right: list[int], block_size: int) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    first = routing_hashes(left, block_size, "s", 1000)
    second = routing_hashes(right, block_size, "s", 1000)
    index = PrefixIndex(1000)
    index.add(first)
    assert index.match(second) == common // block_size


def test_salt_separates_tenants() -> None:
    index = PrefixIndex(10)
    index.add(routing_hashes(range(64), 16, "one", 10))
    assert index.match(routing_hashes(range(64), 16, "two", 10)) == 0


def test_what_a_backend_tells_takes_the_place_of_what_was_sent() -> None:
    index = PrefixIndex(100)
    index.add(PROMPT)
    index.take(PROMPT, [], begins_anew=True)
    assert index.match(PROMPT) == 4
    index.take([], PROMPT[2:], begins_anew=False)
    assert index.match(PROMPT) == 2
    # A restart, or a reader that was too far behind.
    index.take(PROMPT[:1], [], begins_anew=True)
    assert index.match(PROMPT) == 1


def test_what_was_sent_counts_until_the_backend_tells_of_it() -> None:
    index = PrefixIndex(100)
    index.take([], [], begins_anew=True)
    index.add(PROMPT)
    index.take([1, 2], [3], begins_anew=False)
    assert index.match(PROMPT) == 4


def test_what_was_sent_stays_known_where_there_is_no_room_for_what_is_told() -> None:
    index = PrefixIndex(100, most_told=3)
    index.take([101, 102, 103], [], begins_anew=True)
    index.add(PROMPT)
    index.take(PROMPT, [], begins_anew=False)
    assert index.match(PROMPT) == 4


def test_what_is_told_is_bounded() -> None:
    index = PrefixIndex(100, most_told=3)
    index.take(PROMPT, [], begins_anew=True)
    assert (len(index), index.match(PROMPT)) == (3, 3)
    index.take([7], PROMPT[:2], begins_anew=False)
    assert (len(index), index.match([7])) == (2, 1)


def test_index_is_bounded_and_keeps_the_heads() -> None:
    index = PrefixIndex(3)
    index.add(PROMPT)
    assert len(index) == 3
    assert index.match(PROMPT) == 3


@dataclass
class CountedLoad:
    """A load that counts how often it is asked."""

    asked: list[int]
    count: float = 1.0
    is_taken: bool = False
    kv_pressure: float = 0.0

    def standing(self, *, is_idle_only: bool) -> float | None:
        self.asked[0] += 1
        return None if self.is_taken else self.count


def crowd(count: int) -> tuple[list[FakeBackend], list[int]]:
    """So many backends, and a counter of what is asked of their loads."""
    asked = [0]
    made = [FakeBackend(str(number), CountedLoad(asked)) for number in range(count)]  # type: ignore[arg-type]
    return made, asked


def test_what_is_looked_at_does_not_grow_with_the_number_of_backends() -> None:
    figures = []
    for count in (100, 1000):
        many, asked = crowd(count)
        choose = policy()
        for number in range(50):
            assert choose.choose(many, routing_hashes(range(number, number + 64), 16, "", 100)) is not None
        figures.append(asked[0])
    assert figures[0] == figures[1] < 50 * 100


def test_of_a_crowd_the_one_with_the_prefix_is_found_wherever_it_stands() -> None:
    many, _ = crowd(1000)
    choose = policy()
    first = choose.choose(many, PROMPT)
    assert first is not None
    first.prefixes.add(PROMPT)
    longer = routing_hashes([*range(64), *range(900, 964)], 16, "salt", 100)
    for number in range(100):
        other = routing_hashes(range(1000 + number, 1064 + number), 16, "salt", 100)
        choose.choose(many, other)
        assert choose.choose(many, longer) is first
        assert choose.choose(many, PROMPT) is first
    # What it has lost leads nowhere.
    first.prefixes.clear()
    assert choose.choose(many, PROMPT) is not first
    # Nor does one that is no candidate any more.
    first.prefixes.add(PROMPT)
    assert choose.choose([one for one in many if one is not first], PROMPT) is not first


def test_of_a_crowd_the_one_that_told_of_a_prefix_is_found() -> None:
    many, _ = crowd(1000)
    long = routing_hashes(range(1024), 16, "salt", 100)
    many[700].prefixes.take(long, [], begins_anew=True)
    choose = policy()
    choose.note_kept(many[700], long)
    asked = routing_hashes([*range(1024), *range(5000, 5064)], 16, "salt", 100)
    assert [choose.choose(many, asked) for _ in range(3)] == [many[700]] * 3


def test_of_a_crowd_another_engine_that_told_of_a_prefix_is_found_by_names_without_a_salt() -> None:
    many, _ = crowd(1000)
    ids = [*range(1024)]
    plain = routing_hashes(ids, 16, "", 100)
    many[700].prefixes.take(plain, [], begins_anew=True)
    many[700].is_own = False
    choose = policy()
    choose.note_kept(many[700], plain, is_plain=True)
    asked = BlockNames([*ids, *range(5000, 5064)], 16, "salt", 100)
    assert [choose.choose(many, asked) for _ in range(3)] == [many[700]] * 3


def test_in_a_crowd_a_session_stays_and_requests_are_spread() -> None:
    many, _ = crowd(500)
    choose = policy()
    mine = choose.choose(many, (), session="s")
    chosen = set()
    for _ in range(500):
        one = choose.choose(many, ())
        assert one is not None
        one.load.count += 1  # type: ignore[attr-defined]
        chosen.add(one.key)
        assert choose.choose(many, (), session="s") is mine
    assert len(chosen) > 400
    assert max(one.load.count for one in many) <= 4  # type: ignore[attr-defined]


def test_in_a_crowd_the_last_one_with_room_is_found() -> None:
    many, _ = crowd(300)
    for one in many[:-1]:
        one.load.is_taken = True  # type: ignore[attr-defined]
    choose = policy()
    for _ in range(20):
        assert choose.choose(many, PROMPT) is many[-1]
        assert choose.choose(many, PROMPT, avoid={many[-1].key}) is many[-1]
    many[7].load.is_taken = False  # type: ignore[attr-defined]
    assert choose.choose(many, PROMPT, avoid={many[-1].key}) is many[7]
    for one in many:
        one.load.is_taken = True  # type: ignore[attr-defined]
    assert choose.choose(many, PROMPT) is None


def test_a_choice_in_a_list_that_was_seen_before_reads_the_keys_of_few() -> None:
    """Also where the lists of several adapters take turns."""
    read: list[str] = []

    class Named(FakeBackend):
        @property
        def key(self) -> str:  # type: ignore[override]
            read.append(self.name)
            return self.name

        def __init__(self, name: str) -> None:
            self.name, self.load, self.prefixes = name, FakeLoad(), PrefixIndex(1000)

    many = [Named(str(number)) for number in range(1000)]
    lists = [CandidateList(many[:600]), CandidateList(many[400:])]
    choose: Policy[FakeBackend] = policy()
    for one in lists:
        choose.choose(one, PROMPT)
        choose.choose(one, PROMPT)
    read.clear()
    for number in range(10):
        assert choose.choose(lists[number % 2], PROMPT) is not None
    assert len(read) < 200
