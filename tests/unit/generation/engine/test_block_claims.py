"""Blocks that a caller holds beside the engine's requests, and live requests whose cache is released."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from factories.engine.fake_engine import Answer, FakeRunner, collect, engine_config, make_engine, request, run
from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine

PROMPT = [*range(1, 14)]


def ids_of(answers: dict[str, Answer]) -> dict[str, dict[int, list[int]]]:
    return {name: answer.ids for name, answer in answers.items()}


def step(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Run one step, and return the answers so far."""
    answers = {} if answers is None else answers
    collect(answers, engine.step())
    return answers


def requests() -> list[Request]:
    """Make one request of several modes that share a prompt."""
    return [
        request(PROMPT, request_id="greedy", max_new_tokens=12),
        request(PROMPT, request_id="several", max_new_tokens=9, do_sample=True, num_return_sequences=3, seed=5),
        request([*PROMPT, 30], request_id="beams", mode=BeamOptions(3)),
        request([7, 8, 7, 8, 7], request_id="lookup", mode=AssistanceOptions(prompt_lookup_num_tokens=4)),
        request(PROMPT, request_id="scored", max_new_tokens=4, prompt_logprobs=1),
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("names", [("greedy",), ("beams", "several"), ("lookup", "scored", "greedy")])
def test_answers_are_the_same_when_caches_are_released(names: tuple[str, ...], prefix_cache: bool) -> None:
    config = engine_config(prefix_cache=prefix_cache)
    alone = ids_of(run(make_engine(config)[0], *requests()))
    engine, _ = make_engine(config)
    answers: dict[str, Answer] = {}
    for item in requests():
        engine.add(item)
    released = 0
    while engine.has_work:
        collect(answers, engine.step())
        released += engine.release_cache([name for name in names if name in engine._groups])
        engine.check_integrity()
        # A request that loses everything before each step would never get beyond its prompt.
        collect(answers, engine.step())
        engine.check_integrity()
    assert ids_of(answers) == alone
    assert released
    assert engine.load().kv_blocks_used == 0


def test_released_blocks_are_free_and_found_no_more() -> None:
    engine, _ = make_engine(engine_config())
    engine.add(request(PROMPT, request_id="a", max_new_tokens=20))
    begun = step(engine)
    used = engine.load().kv_blocks_used
    assert engine.release_cache(["a"]) == used == 4
    load = engine.load()
    assert (load.kv_blocks_used, load.kv_blocks_evictable, load.waiting_requests) == (0, 0, 1)
    hits = engine.stats.prefix_hit_tokens
    run(engine, answers=begun)
    assert engine.stats.prefix_hit_tokens == hits
    assert engine.stats.preemptions == 1


def test_blocks_that_another_request_uses_stay() -> None:
    engine, runner = make_engine(engine_config())
    begun: dict[str, Answer] = {}
    for name in ("a", "b"):
        engine.add(request(PROMPT, request_id=name, max_new_tokens=20))
        begun = step(engine, begun)
    # The prompt's three full blocks are shared.
    assert engine.release_cache(["a"]) == 1
    begun = step(engine, begun)
    # It finds them again, and computes what is after them; b draws its next token.
    assert runner.steps[-1].num_tokens <= 4
    run(engine, answers=begun)


def test_a_request_that_waits_holds_nothing() -> None:
    engine, _ = make_engine(engine_config())
    engine.add(request(PROMPT, request_id="a"))
    assert engine.release_cache(["a", "a"]) == 0
    assert engine.stats.preemptions == 0
    run(engine)


def test_an_unknown_request_is_named_and_none_is_touched() -> None:
    engine, _ = make_engine(engine_config())
    engine.add(request(PROMPT, request_id="a", max_new_tokens=20))
    engine.step()
    with pytest.raises(NotFound, match=r"live_request_ids\[1\]: no live request") as caught:
        engine.release_cache(["a", "b"])
    assert (caught.value.reason, caught.value.field) == ("REQUEST_NOT_FOUND", "live_request_ids[1]")
    assert engine.load().running_requests == 1


def claimed(engine: Engine, blocks: Iterable[int]) -> int:
    engine.caller_blocks.claim(blocks)
    engine.check_integrity()
    return engine.load().kv_blocks_used


def test_claimed_blocks_are_the_callers_until_they_are_released() -> None:
    engine, runner = make_engine(engine_config(num_blocks=8))
    assert claimed(engine, [0, 3, 5]) == 3
    assert claimed(engine, [5, 3]) == 3
    run(engine, request(PROMPT, max_new_tokens=6))
    for block in (0, 3, 5):
        assert runner.kv[block] == [None] * 4, "a request wrote into a claimed block"
    assert engine.caller_blocks.release([5, 6]) == 1
    assert engine.caller_blocks.release() == 2
    assert not engine.caller_blocks.device
    engine.check_integrity()
    assert engine.load().kv_blocks_used == 0


def test_a_claimed_block_loses_its_prefix() -> None:
    engine, _ = make_engine(engine_config())
    run(engine, request(PROMPT))
    assert engine.load().kv_blocks_evictable > 0
    claimed(engine, range(63))
    assert engine.load().kv_blocks_evictable <= 1
    engine.caller_blocks.release()
    assert engine.load().kv_blocks_free >= 63


def test_a_check_leaves_the_request_as_it_is() -> None:
    engine, _ = make_engine(engine_config())
    engine.weights_changed()
    item = request(PROMPT)
    before = copy.copy(item)
    engine.check(item)
    assert item == before


def test_requests_are_checked_against_the_blocks_that_are_left() -> None:
    engine, _ = make_engine(engine_config(num_blocks=8))
    large = request(PROMPT, max_new_tokens=16)
    engine.check(large)
    claimed(engine, [0, 1])
    with pytest.raises(ResourceExhausted, match="the pool has 6"):
        engine.check(large)
    # One that was checked before.
    with pytest.raises(ResourceExhausted, match="the pool has 6"):
        engine.add(large)
    assert not engine.has_work
    engine.caller_blocks.release()
    run(engine, large)


def test_wrong_claims_are_refused_whole() -> None:
    engine, _ = make_engine(engine_config(num_blocks=8))
    for bad in ([1, 8], [-1]):
        with pytest.raises(InvalidArgument, match="slots: every block must be from 0 to 7"):
            engine.caller_blocks.claim(bad, "slots")
    with pytest.raises(FailedPrecondition, match="at least one block") as caught:
        engine.caller_blocks.claim(range(8))
    assert caught.value.reason == "BLOCK_IN_USE"
    claimed(engine, [2])
    engine.add(request(PROMPT, max_new_tokens=4))
    with pytest.raises(FailedPrecondition, match="requests are live") as caught:
        engine.caller_blocks.claim([2, 4])
    assert caught.value.reason == "BUSY"
    # Those that are claimed already need no idle engine.
    engine.caller_blocks.claim([2])
    assert engine.caller_blocks.device == {2}
    run(engine)


def test_weights_are_not_replaced_under_claimed_blocks() -> None:
    engine, runner = make_engine(engine_config(num_blocks=8))
    run(engine, request(PROMPT, max_new_tokens=3))
    claimed(engine, [2])
    fresh, warmed = FakeRunner(engine.config), list[bool]()
    with pytest.raises(FailedPrecondition, match="a caller holds blocks") as caught:
        engine.reinitialise(fresh, lambda: warmed.append(True))
    assert caught.value.reason == "BUSY"
    before = len(runner.steps)
    assert not warmed
    assert run(engine, request(PROMPT, max_new_tokens=3))
    assert len(runner.steps) > before
    engine.caller_blocks.release()
    engine.reinitialise(fresh, lambda: warmed.append(True))
    assert warmed
    # Nothing that was computed so far counts any more.
    assert engine.load().kv_blocks_evictable == 0
    run(engine, request(PROMPT, max_new_tokens=3))
    assert fresh.steps[0].num_tokens == len(PROMPT)


def test_a_block_that_a_request_holds_is_refused_by_its_number() -> None:
    engine, _ = make_engine(engine_config(num_blocks=16))
    engine.add(request(PROMPT, max_new_tokens=4))
    begun = step(engine)
    claims = engine._scheduler.claims
    (group,) = engine._groups.values()
    held = group.sequences[0].block_table
    with pytest.raises(FailedPrecondition, match=rf"^blocks {held[0]}, .*: a request") as caught:
        claims.claim(sorted(held))
    assert caught.value.reason == "BLOCK_IN_USE"
    assert not claims
    run(engine, answers=begun)
