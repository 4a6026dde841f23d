"""A trace of steps, and its replay through the scheduler."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from factories.engine.fake_engine import FakeDrafter, FakeRunner, engine_config, prompt_embeds, request
from factories.engine.host_pools import AnyPolicy
from penstock.common.errors import ResourceExhausted
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.prompt_embeds import PLACEHOLDER, PromptEmbeds
from penstock.generation.core.request import Purpose, Request, TokenHealingOptions
from penstock.generation.engine import trace_file
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.step_trace import StepTrace
from penstock.generation.engine.trace_file import TraceFile
from structlog.testing import capture_logs

from tools._recorded import Trace, TraceError
from tools.replay import changed, first_difference, main, simulate, step_cost

HEADS: tuple[list[int], ...] = ([], [1, 2, 3, 4, 5, 6, 7, 8, 9], [*range(10, 36)])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "logprobs": {"prompt_logprobs": 0},
    "beams": {"mode": BeamOptions(3)},
    "beams that decide together": {"mode": BeamOptions(3), "allowed_token_ids": frozenset(range(40))},
    "group beams": {"mode": BeamOptions(4, num_beam_groups=2, diversity_penalty=0.5)},
    "guidance": {"guidance": GuidanceOptions(1.5, (40, 41, 42, 43, 44, 45))},
    "prompt lookup": {"mode": AssistanceOptions(prompt_lookup_num_tokens=4)},
    "memory": {"mode": AssistanceOptions(ngram_memory_num_tokens=4, ngram_memory_match=2)},
    "lookahead": {"mode": AssistanceOptions(lookahead_window=3), "num_return_sequences": 2, "do_sample": True},
    "draft model": {"mode": AssistanceOptions(5), "num_return_sequences": 2, "do_sample": True},
    "contrastive": {"mode": ContrastiveOptions(0.6, 3)},
}


class Runner(FakeRunner):
    """Runner that also answers contrastive search and embedding."""

    def draw(self, sequence: Any, context: Any) -> Any:
        token = super().draw(sequence, context)
        if sequence.draw.similarity:
            token.similarity = context[-1] / 50
        return token


def random_request(random: Random, mode: str, block_size: int) -> Request:
    prompt = random.choice(HEADS) + [random.randint(0, 2) for _ in range(random.randint(1, 12))]
    item = request(
        prompt,
        max_new_tokens=random.randint(1, 24),
        eos_token_ids=random.choice([(), (3, 4, 5, 6, 7)]),
        seed=random.randint(0, 3),
        priority=random.randint(0, 2),
        arrival_time=random.random(),
        cache_salt=random.choice(["", "tenant"]),
        fair_share_key=random.choice(["", "a", "b"]),
        **MODES[mode],
    )
    if mode == "greedy" and random.random() < 0.3:
        item.purpose = random.choice([Purpose.SCORE, Purpose.EMBED])
        item.first_needed_row = 0
        if len(item.prompt_token_ids) < 2:
            item.purpose = Purpose.EMBED
    elif mode in ("several", "beams") and len(prompt) > 1 and random.random() < 0.3:
        item.token_healing = TokenHealingOptions(frozenset([prompt[-1], 30]), lambda _: "")
    if item.purpose is Purpose.GENERATE and item.token_healing is None and random.random() < 0.3:
        item.prompt_token_ids, item.embeds = embedded(random, prompt, block_size)
    return item


def embedded(random: Random, prompt: list[int], block_size: int) -> tuple[list[int], PromptEmbeds]:
    """Make a prompt whose beginning, or all of it, came as embeddings: of few kinds, some without ids."""
    # Blocks of one kind each, so that beginnings are equal now and then.
    kinds = [random.randint(0, 1) for _ in range(0, len(prompt), block_size) for _ in range(block_size)]
    kinds = kinds[: random.randint(1, len(prompt))]
    unknown = random.choice([0, len(kinds)])
    embeds = prompt_embeds(kinds, block_size, num_placeholders=unknown)
    return [PLACEHOLDER] * unknown + prompt[unknown:], embeds


def traced(
    path: Path, config: EngineConfig, clock: Callable[[], float] = time.monotonic, **runner: Any
) -> tuple[Engine, TraceFile]:
    file = TraceFile(str(path), 1 << 24)
    file.start()
    return Engine(
        config,
        Runner(config, **runner),
        None,
        drafter=FakeDrafter(0.7),
        listeners=[StepTrace(config, file, clock())],
        clock=clock,
    ), file


def run_mixed(
    path: Path,
    random: Random,
    modes: list[str],
    config: EngineConfig,
    count: int = 16,
    clock: Callable[[], float] = time.monotonic,
    *,
    sets_back: bool = False,
) -> Engine:
    """Requests of `modes` that arrive while others run; some are aborted, and the cache is cleared now and then.

    `sets_back`: some live ones are set back, too, and a caller holds blocks for a while.
    """
    engine, file = traced(path, config, clock)
    engine.policy = AnyPolicy(config, random)
    items = []
    if sets_back:
        engine.caller_blocks.claim(random.sample(range(config.num_blocks), 3))
    for _ in range(count):
        item = random_request(random, random.choice(modes), config.block_size)
        try:
            engine.check(item)
            engine.add(item)
        except ResourceExhausted:
            continue
        items.append(item)
        for _ in range(random.randint(0, 4)):
            engine.step()
        if random.random() < 0.15:
            engine.abort(random.choice(items).request_id)
        if random.random() < 0.1:
            engine.clear_cache()
        if sets_back and engine._groups and random.random() < 0.4:
            engine.release_cache([random.choice([*engine._groups])])
            engine.check_integrity()
        if sets_back and random.random() < 0.1:
            engine.caller_blocks.release()
    while engine.has_work:
        steps, is_due = engine.stats.steps, engine._scheduler.has_work
        engine.step()
        assert engine.stats.steps == steps + is_due, "a step is empty though there is work"
    file.close()
    return engine


SMALL = engine_config(num_blocks=26, max_batch_tokens=24, max_running_sequences=12)
# For the draws of a preemption to fall this way and that: half of them find it cheaper to swap.
HOSTED = dataclasses.replace(SMALL, num_host_blocks=40)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("config", [SMALL, HOSTED], ids=["without a host pool", "with one"])
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_of_each_mode_schedules_the_same(tmp_path: Path, mode: str, config: EngineConfig) -> None:
    preemptions = swaps = 0
    for seed in range(5):
        engine = run_mixed(tmp_path / "trace", Random(seed), [mode], config)
        preemptions += engine.stats.preemptions
        swaps += engine.stats.swaps
        trace = Trace.read(tmp_path / "trace")
        assert len(trace.steps) == engine.stats.steps
        assert trace.end == "stopped"
        assert first_difference(trace) is None
    assert preemptions
    assert (0 < swaps < preemptions) == bool(config.num_host_blocks), (swaps, preemptions)


def test_no_step_is_empty_where_sequences_in_lockstep_find_in_the_cache_what_they_lacked(tmp_path: Path) -> None:
    """As after a preemption, beside a tenant that rests: turns depend on the time that steps take."""
    random, now = Random("c33"), 1000.0
    jump, share = random.choice([1e-4, 1e-3, 0.02, 0.5, 3.0]), random.random()

    def clock() -> float:
        nonlocal now
        now += random.random() * jump if random.random() < share else 1e-6
        return now

    run_mixed(tmp_path / "trace", Random(33), ["beams that decide together"], SMALL, clock=clock)
    assert first_difference(Trace.read(tmp_path / "trace")) is None


def test_a_trace_keeps_nothing_of_requests_that_ended(tmp_path: Path) -> None:
    """Contrastive search begins with other sequences after a preemption."""
    preemptions = 0
    for seed in range(5):
        engine = run_mixed(tmp_path / "trace", Random(seed), ["contrastive", "several"], SMALL)
        preemptions += engine.stats.preemptions
        trace = engine._listeners.all[-1]
        assert isinstance(trace, StepTrace)
        assert (trace._blocks, trace._tokens, trace._widths) == ({}, {}, {})
    assert preemptions


def test_a_replay_of_mixed_modes_schedules_the_same(tmp_path: Path) -> None:
    preemptions = hits = 0
    for seed in range(8):
        random = Random(seed)
        config = engine_config(
            num_blocks=random.randint(30, 60),
            block_size=random.randint(1, 6),
            max_running_sequences=random.randint(5, 12),
            max_batch_tokens=random.randint(12, 40),
            prefix_cache=random.random() < 0.8,
        )
        engine = run_mixed(tmp_path / "trace", random, list(MODES), config)
        preemptions += engine.stats.preemptions
        hits += engine.stats.prefix_hit_tokens
        assert first_difference(Trace.read(tmp_path / "trace")) is None, seed
    assert preemptions
    assert hits


def test_a_replay_sets_requests_back_as_they_were(tmp_path: Path) -> None:
    """And has the blocks that a caller held."""
    preemptions, was_set_back = 0, False
    for seed in range(8):
        random = Random(seed)
        engine = run_mixed(tmp_path / "trace", random, list(MODES), SMALL, sets_back=True)
        preemptions += engine.stats.preemptions
        text = (tmp_path / "trace").read_text()
        assert '"claimed":' in text
        was_set_back |= '"set_back":' in text
        assert first_difference(Trace.read(tmp_path / "trace")) is None, seed
    assert preemptions
    assert was_set_back


def test_a_trace_of_the_first_format_is_read(tmp_path: Path) -> None:
    """It had other names for the unconditional branch."""
    path = tmp_path / "trace"
    run_mixed(path, Random(4), ["guidance"], SMALL)
    text = path.read_text()
    assert '"is_unconditional":' in text
    old = text.replace('"is_unconditional":', '"is_guide":').replace('"unconditional":', '"guide":')
    path.write_text(old.replace('{"penstock_trace":3,', '{"penstock_trace":1,'))
    trace = Trace.read(path)
    assert json.loads(path.read_text().splitlines()[0])["penstock_trace"] == 1
    assert first_difference(trace) is None
    assert simulate(trace, trace.config).finished == 16


def test_what_differs_first_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    run_mixed(path, Random(1), list(MODES), SMALL)
    assert main([str(path)]) == 0
    assert "the same rows in every step" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    step = json.loads(lines[7])
    step["rows"][0][4] += 1
    path.write_text("\n".join([*lines[:7], json.dumps(step), *lines[8:], ""]))
    assert main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert f"step {step['step']}: rows" in shown
    assert "replay: [[" in shown


def test_another_order_of_requests_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run_mixed(path, Random(2), ["greedy"], SMALL)
    trace = Trace.read(path)
    for line in trace.steps:
        for event in line["events"]:
            if "add" in event:
                event["priority"] = -event["priority"]
    assert first_difference(trace) is not None


@pytest.mark.parametrize("mode", ["mixed", "several", "beams", "contrastive", "draft model"])
def test_what_another_configuration_would_have_been_like(tmp_path: Path, mode: str) -> None:
    run_mixed(tmp_path / "trace", Random(3), list(MODES) if mode == "mixed" else [mode], SMALL)
    trace = Trace.read(tmp_path / "trace")
    arrivals = sum("add" in event for line in trace.steps for event in line["events"])
    base = simulate(trace, trace.config)
    for settings in (
        ["max_batch_tokens=13"],
        ["num_blocks=300"],
        ["prefix_cache=0"],
        ["block_size=8", "num_blocks=13"],
    ):
        figures = simulate(trace, changed(trace.config, settings))
        assert figures.finished + figures.refused == arrivals
        assert figures.lost <= 1
    roomy = simulate(trace, changed(trace.config, ["num_blocks=300", "max_batch_tokens=400"]))
    assert roomy.preemptions == 0
    assert roomy.steps <= base.steps


def test_a_shorter_step_of_the_same_requests_takes_more_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    run_mixed(path, Random(5), ["greedy", "several"], engine_config(num_blocks=200, tenant_slowdown=0.0))
    assert main([str(path), "--set", "max_batch_tokens=16", "--steps"]) == 0
    shown = capsys.readouterr().out
    recorded, told = next(line.split()[1:] for line in shown.splitlines() if line.startswith("steps "))
    assert int(told) > int(recorded)
    assert f"step {told} at" in shown


def test_the_cost_of_a_step_is_fitted() -> None:
    def trace(*steps: tuple[int, float]) -> Trace:
        lines = [{"rows": [[0, 0, "p", 0, rows, 1]], "seconds": seconds} for rows, seconds in steps]
        return Trace(SMALL, "", lines, "stopped", {}, {})

    assert step_cost(trace((1, 0.2), (2, 0.3), (4, 0.5))) == pytest.approx((0.1, 0.1))
    assert step_cost(trace((1, 0.2), (1, 0.4))) == pytest.approx((0.3, 0.0))
    assert step_cost(trace((1, 0.4), (3, 0.2))) == pytest.approx((0.3, 0.0))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--set", "speed=3"], "speed"),
        (["--set", "num_blocks=many"], "num_blocks=many"),
        (["--set", "num_blocks=0"], "num_blocks"),
    ],
)
def test_a_setting_that_is_none_is_named(
    tmp_path: Path, arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_mixed(tmp_path / "trace", Random(6), ["greedy"], SMALL, count=2)
    assert main([str(tmp_path / "trace"), *arguments]) == 2
    assert names in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"penstock_trace": 99}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text(text)
    assert main([str(tmp_path / "trace")]) == 2
    assert capsys.readouterr().err.startswith("replay: ")
    with pytest.raises((TraceError, ValueError)):
        Trace.read(tmp_path / "trace")


def test_a_trace_tells_no_token_and_no_id(tmp_path: Path) -> None:
    canary = 7_654_321
    engine, file = traced(tmp_path / "trace", SMALL, vocab_size=2 * canary, script=dict.fromkeys(range(20), canary))
    for _ in range(2):
        item = request([canary] * 9, request_id="canary-request", cache_salt="canary-salt", max_new_tokens=20)
        engine.add(item)
        while engine.has_work:
            engine.step()
    file.close()
    text = (tmp_path / "trace").read_text()
    assert str(canary) not in text
    assert "canary" not in text
    # Nor do two traces of the same tokens tell that they are the same.
    again, other = traced(tmp_path / "other", SMALL, vocab_size=2 * canary)
    again.add(request([canary] * 9, cache_salt="canary-salt"))
    again.step()
    other.close()

    def blocks(path: Path) -> set[int]:
        trace = Trace.read(path)
        return set(trace.steps[0]["events"][0]["sequences"][0]["blocks"])

    assert len(blocks(tmp_path / "trace")) == 2
    assert not blocks(tmp_path / "trace") & blocks(tmp_path / "other")


def test_a_full_file_ends_and_its_beginning_can_be_replayed(tmp_path: Path) -> None:
    config = engine_config()
    file = TraceFile(str(tmp_path / "trace"), 6000)
    file.start()
    engine = Engine(config, FakeRunner(config), None, listeners=[StepTrace(config, file, time.monotonic())])
    with capture_logs() as logs:
        for number in range(6):
            engine.add(request([number] * 9, max_new_tokens=30))
        while engine.has_work:
            engine.step()
        file.close()
    assert (tmp_path / "trace").stat().st_size <= 6000 + len('{"end": "full"}\n')
    assert [log["event"] for log in logs] == ["the trace of steps is full"]
    trace = Trace.read(tmp_path / "trace")
    assert (trace.end, len(trace.steps) > 1) == ("full", True)
    assert first_difference(trace) is None
    assert not file._lines


def test_a_disk_that_is_too_slow_is_told_at_the_end_and_the_beginning_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing is written before the end.
    monkeypatch.setattr(trace_file, "_INTERVAL_SECONDS", 600.0)
    monkeypatch.setattr(trace_file, "_MAX_QUEUED_LINES", 4)
    config = engine_config()
    file = TraceFile(str(tmp_path / "trace"), 1 << 20)
    file.start()
    engine = Engine(config, FakeRunner(config), None, listeners=[StepTrace(config, file, time.monotonic())])
    engine.add(request([1, 2, 3], max_new_tokens=9))
    with capture_logs() as logs:
        while engine.has_work:
            engine.step()
        file.close()
    assert [log["event"] for log in logs] == ["steps are not traced"]
    trace = Trace.read(tmp_path / "trace")
    assert (trace.end, len(trace.steps)) == ("too slow", 3)
    assert main([str(tmp_path / "trace")]) == 0
    assert "3 steps of" in (shown := capsys.readouterr().out)
    assert "trace ended: too slow" in shown
