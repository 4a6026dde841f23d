"""Prompt lookup drafts while its drafts pay, and loses no more than a few steps in a hundred where they do not."""

from __future__ import annotations

import time

import pytest
from factories.engine.fake_engine import FakeRunner, engine_config, make_engine, request, run
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.draft_account import DraftAccount

MOST = 10


class Price:
    """Costs of a machine: a share of a step at once, and one for each draft."""

    def __init__(self, base: float, each: float) -> None:
        self.base, self.each = base, each

    def of(self, num_drafts: int) -> float:
        return self.base + self.each * num_drafts


def steps_of(price: Price, right: list[bool]) -> tuple[float, int]:
    """Return the time of an answer in steps without drafts, and the verifications. `right`: whether a draft of this
    token would be accepted."""
    account = DraftAccount(price)
    seconds, verified, at = 0.0, 0, 0
    while at < len(right):
        number = account.affordable(MOST, at)
        seconds += 1.0
        if number:
            seconds += price.of(number)
            verified += 1
            following = right[at : at + number]
            accepted = following.index(False) if False in following else len(following)
            account.note(number, accepted)
            at += accepted
        at += 1
    return seconds, verified


@pytest.mark.parametrize("price", [Price(0.0, 0.002), Price(0.1, 0.03), Price(0.3, 0.1), Price(3.0, 1.0)])
@pytest.mark.parametrize("length", [48, 400, 4000])
def test_wrong_drafts_take_at_most_a_hundredth_longer_beyond_the_first_credit(price: Price, length: int) -> None:
    seconds, _ = steps_of(price, [False] * length)
    assert seconds <= 1.01 * length + 0.48


@pytest.mark.parametrize("price", [Price(0.0, 0.01), Price(0.1, 0.03)])
def test_a_text_that_repeats_itself_is_drafted_all_the_time(price: Price) -> None:
    seconds, verified = steps_of(price, [True] * 400)
    assert seconds < 400 / 5
    # All but the first few verifications have as many drafts as were asked for.
    assert verified <= 400 / (MOST + 1) + 3


def test_a_repetition_is_found_after_a_long_text_without() -> None:
    seconds, _ = steps_of(Price(0.1, 0.03), [False] * 400 + [True] * 400)
    assert seconds < 400 * 1.02 + 400 / 4


def test_gains_of_a_long_repetition_are_not_spent_on_the_text_after_it() -> None:
    price = Price(0.1, 0.03)
    repeated, _ = steps_of(price, [True] * 400)
    seconds, _ = steps_of(price, [True] * 400 + [False] * 400)
    assert seconds - repeated <= 1.01 * 400 + 1.5


def test_where_drafts_cost_hardly_anything_one_right_draft_of_thirty_keeps_them_coming() -> None:
    _, verified = steps_of(Price(0.0, 0.01), [at % 30 == 0 for at in range(900)])
    assert verified > 600


def test_an_engines_lookups_pause_where_nothing_is_accepted_and_change_no_id() -> None:
    """The prompt repeats one pair of tokens, each time with another token after it, and so does the answer."""
    # Every second token is 7, so that each step finds a match, and what follows differs.
    script = {place: 7 if place % 2 else 100 + place for place in range(120)}
    config = engine_config(num_blocks=100, max_batch_tokens=400)
    plain, _ = make_engine(config, script=script)
    item = request([7, 50, 7, 51, 7], max_new_tokens=120)
    expected = run(plain, item)[item.request_id].ids
    # By the real clock a step without a model takes as long with drafts as without.
    runners: list[FakeRunner] = []
    begun = time.monotonic()

    def clock() -> float:
        return begun + sum(1.0 + 0.1 * (step.num_tokens - 1) for runner in runners for step in runner.steps)

    engine, runner = make_engine(config, script=script, clock=clock)
    runners.append(runner)
    asked = request(
        [7, 50, 7, 51, 7],
        max_new_tokens=120,
        mode=AssistanceOptions(prompt_lookup_num_tokens=MOST, max_matching_ngram_size=1),
    )
    assert run(engine, asked)[asked.request_id].ids == expected
    drafted = [step for step in runner.steps[1:] if step.num_tokens > 1]
    assert 0 < len(drafted) < 40
