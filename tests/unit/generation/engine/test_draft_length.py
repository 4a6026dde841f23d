"""Number of drafts that a head makes: what pays, by acceptance and costs."""

from __future__ import annotations

from itertools import pairwise

from penstock.generation.engine.draft_length import DraftLength


class Costs:
    """Known costs: of each draft, to verify and to make."""

    def __init__(self, each: float, drafting: float = 0.0, *, is_known: bool = True) -> None:
        self.each, self.drafting, self.is_known = each, drafting, is_known
        self.num_asked = 0

    def measure(self) -> None: ...

    def of(self, num_drafts: int) -> float:
        return 0.05 + self.each * num_drafts

    def of_drafting(self, num_drafts: int) -> float:
        return self.drafting * num_drafts

    def retries(self) -> bool:
        self.num_asked += 1
        return self.num_asked % 5 == 0


def practised(costs: Costs, num_drafts: int, accepted: int) -> DraftLength:
    length = DraftLength(costs, 16)
    for _ in range(40):
        length.note(num_drafts, accepted)
    return length


def test_the_better_drafts_are_the_longer_chains_are() -> None:
    lengths = [practised(Costs(0.05), 5, accepted).affordable(16) for accepted in (1, 3, 5)]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] > 8


def test_dear_rows_make_chains_short_and_so_does_a_dear_head() -> None:
    cheap, dear, slow = (practised(costs, 4, 3).affordable(16) for costs in (Costs(0.02), Costs(0.2), Costs(0.02, 0.2)))
    assert cheap > dear > 0
    assert cheap > slow > 0


def test_no_more_drafts_are_made_than_asked_for() -> None:
    assert practised(Costs(0.01), 4, 4).affordable(3) == 3


def test_where_none_pays_single_drafts_are_tried_after_ever_longer_pauses() -> None:
    length = practised(Costs(0.3), 1, 0)
    made = [place for place in range(200) if length.affordable(9)]
    gaps = [later - earlier for earlier, later in pairwise(made)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 9
    assert gaps[-1] > 30


def test_where_right_drafts_would_not_pay_either_new_sequences_try_none() -> None:
    costs = Costs(0.9, 0.9)
    numbers = [DraftLength(costs, 16).affordable(9) for _ in range(10)]
    assert numbers == [0] * 10
    length = DraftLength(costs, 16)
    # Asked about at every ninth opportunity alone; a draft is made at the next one.
    made = [place for place in range(200) if length.affordable(9)]
    assert made == list(range(37, 200, 46))
    cheaper = DraftLength(Costs(0.1), 16)
    assert cheaper.affordable(9) > 0


def test_a_head_whose_right_drafts_would_not_pay_reads_no_rows_but_before_a_trial() -> None:
    length = DraftLength(Costs(0.9, 0.9), 16)
    assert length.rests
    read, made = [], []
    for place in range(100):
        if not length.rests:
            read.append(place)
        if length.affordable(9):
            made.append(place)
    assert read == made == [37, 83]
    costs = Costs(0.1)
    assert not DraftLength(costs, 16).rests
    assert not DraftLength(Costs(0.9, is_known=False), 16).rests


def test_a_head_that_rests_begins_again_when_rows_become_cheap() -> None:
    costs = Costs(0.9, 0.9)
    length = DraftLength(costs, 16)
    assert not length.affordable(9)
    costs.each, costs.drafting = 0.05, 0.05
    while not (number := length.affordable(9)):
        assert length.rests
    assert number > 1
    assert not length.rests


def test_drafting_is_resumed_once_drafts_are_right_again() -> None:
    length = practised(Costs(0.2), 1, 0)
    while not length.affordable(8):
        pass
    for _ in range(30):
        length.note(1, 1)
    while not (number := length.affordable(8)):
        pass
    assert number > 1


def test_a_step_without_drafts_is_measured_first_but_not_waited_for() -> None:
    length = DraftLength(Costs(0.02, is_known=False), 16)
    numbers = [length.affordable(8) for _ in range(6)]
    assert numbers[:3] == [0, 0, 0]
    assert numbers[3] > 0
    known = DraftLength(Costs(0.02), 16)
    assert known.affordable(8) > 0


def test_it_is_measured_again_now_and_then() -> None:
    length = DraftLength(Costs(0.02), 16)
    for _ in range(128):
        length.note(4, 3)
    assert [length.affordable(8) > 0 for _ in range(3)] == [False, False, True]
