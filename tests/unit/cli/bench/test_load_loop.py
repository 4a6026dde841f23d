"""`penstock bench`: the requests of its loops, and its figures, on a server that is a few lines here."""

from __future__ import annotations

import asyncio
import time

import pytest
from penstock.cli.bench.config import BenchConfig, lengths
from penstock.cli.bench.load_loop import NOT_SENT, Loop, Run
from penstock.cli.bench.report import distribution, greatest_rate_served, summary
from penstock.cli.bench.target import BenchPrompt, Prompts, Sample
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError

VOCAB = 100


class Server:
    """Answers after `seconds` and when it `may_answer`; remembers what was asked and how many were open at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.prompts: list[BenchPrompt] = []
        self.open = self.most_open = 0

    async def run(self, prompt: BenchPrompt, due: float) -> Sample:
        self.prompts.append(prompt)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(self.seconds)
        await self.may_answer.wait()
        self.open -= 1
        now = time.perf_counter()
        return Sample(due, len(prompt.token_ids), [(now, prompt.output_tokens)], now)


def loop(server: Server, **options: object) -> Loop:
    config = BenchConfig(**options)  # type: ignore[arg-type]
    return Loop(config, server, Prompts(config, VOCAB), lambda run: None)


def sample(*arrivals: float, tokens: int = 1, failure: str = "") -> Sample:
    """Due at 0, ended with the last arrival."""
    return Sample(0.0, 10, [(at, tokens) for at in arrivals], arrivals[-1] if arrivals else 0.0, failure)


async def test_a_closed_loop_keeps_its_number_of_requests_open() -> None:
    server = Server(0.005)
    run = await loop(server, concurrency=3, requests=12).measure()
    assert (len(run.samples), run.sent, server.most_open) == (12, 12, 3)


async def test_a_closed_loop_ends_with_its_duration() -> None:
    run = await loop(Server(0.01), concurrency=2, duration_seconds=0.1).measure()
    assert 2 <= len(run.samples) <= 40
    assert run.ended - run.started >= 0.1


async def measured_once_sent(made: Loop, server: Server) -> Run:
    """The run whose server answers when everything is sent."""
    measuring = asyncio.ensure_future(made.measure())
    async with asyncio.timeout(60):
        while made._run.sent < (made._config.num_requests or 0):  # noqa: ASYNC110 (nobody announces it)
            await asyncio.sleep(0.001)
    server.may_answer.set()
    return await measuring


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server()
    server.may_answer.clear()
    run = await measured_once_sent(loop(server, rate=500.0, requests=20), server)
    assert len(run.samples) == 20
    assert server.most_open == 20


async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    run = await loop(Server(0.05), rate=200.0, requests=5).measure()
    assert all(sample.ttft >= 0.05 for sample in run.samples)
    assert all(run.started < sample.due < run.ended for sample in run.samples)


async def test_requests_over_the_bound_are_failures_that_were_never_sent() -> None:
    server = Server()
    server.may_answer.clear()
    run = await measured_once_sent(loop(server, rate=1000.0, requests=10, max_open_requests=4), server)
    assert server.most_open == 4
    assert [sample.failure for sample in run.samples].count(NOT_SENT) == 6


async def test_warm_up_requests_do_not_count() -> None:
    server = Server()
    made = loop(server, requests=3, warmup=5)
    await made.warm_up()
    assert len(server.prompts) == 5
    assert len((await made.measure()).samples) == 3


async def test_prompts_have_the_lengths_and_the_beginning_that_were_asked_for() -> None:
    server = Server()
    await loop(server, requests=40, prompt_tokens="20-24", output_tokens="3", common_prefix_tokens=16).measure()
    assert {len(prompt.token_ids) for prompt in server.prompts} == {20, 21, 22, 23, 24}
    assert len({tuple(prompt.token_ids[:16]) for prompt in server.prompts}) == 1
    assert len({tuple(prompt.token_ids[16:]) for prompt in server.prompts}) == 40
    assert {prompt.output_tokens for prompt in server.prompts} == {3}


async def test_the_same_seed_asks_the_same() -> None:
    servers = [Server(), Server(), Server()]
    for server, seed in zip(servers, (1, 1, 2), strict=True):
        await loop(server, requests=4, seed=seed, text=True).measure()
    assert servers[0].prompts == servers[1].prompts != servers[2].prompts
    assert all(len(str(prompt.text).split()) == 128 for prompt in servers[0].prompts)


def test_percentiles_are_values_that_were_measured() -> None:
    found = distribution([0.001 * value for value in range(1, 101)])
    assert found is not None
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (50.0, 90.0, 99.0, 100.0)
    assert found["mean"] == pytest.approx(50.5)
    assert distribution([]) is None


def test_goodput_counts_the_requests_that_met_every_objective() -> None:
    config = BenchConfig(slo_ttft_seconds=0.2, slo_tpot_seconds=0.1)
    samples = [
        sample(0.1, 0.15, 0.2),
        sample(0.3, 0.35),  # too late a start
        sample(0.1, 0.5),  # too slow after it
        sample(failure="RESOURCE_EXHAUSTED QUEUE_FULL"),
    ]
    result = summary(Run(samples, sent=4, started=0.0, ended=2.0), config)
    assert result["goodput"] == {"requests_per_second": 0.5, "output_tokens_per_second": 1.5, "share": 0.25}
    assert result["failures"] == {"RESOURCE_EXHAUSTED QUEUE_FULL": 1}
    assert (result["succeeded"], result["requests_per_second"]) == (3, 1.5)


def test_tokens_of_the_first_delta_are_not_counted_as_decoded() -> None:
    result = summary(Run([sample(0.1, 0.3, 0.5, tokens=2)], ended=1.0), BenchConfig())
    times = result["milliseconds"]
    assert (times["ttft"]["p50"], times["itl"]["p50"], times["tpot"]["p50"]) == (100.0, 200.0, 100.0)
    assert "goodput" not in result


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1"])
def test_rates_that_are_none_name_the_flag(rate: str) -> None:
    with pytest.raises(StartupError) as caught:
        from_env_and_flags(BenchConfig, {"rate": rate})
    assert caught.value.flag == "--rate"


@pytest.mark.parametrize("text", ["0", "5-4", "x", "1-", "", "-3", "1-2-3"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        lengths(text)


def run_of(rate: float, served: int, goodput: float | None = None) -> dict[str, object]:
    objectives = {} if goodput is None else {"goodput": {"share": goodput}}
    return {"rate": rate, "requests": 100, "succeeded": served, **objectives}


@pytest.mark.parametrize(
    ("runs", "share", "rate"),
    [
        ([run_of(1, 100), run_of(2, 99), run_of(4, 98)], 0.99, 2),
        ([run_of(4, 98), run_of(1, 100), run_of(2, 99)], 0.99, 2),
        ([run_of(1, 98), run_of(2, 100)], 0.99, None),
        ([run_of(1, 100, 1.0), run_of(2, 100, 0.5)], 0.9, 1),
        ([run_of(1, 100, 1.0), run_of(2, 100, 0.5)], 0.5, 2),
    ],
)
def test_the_greatest_rate_served_is_one_below_which_all_were(
    runs: list[dict[str, object]], share: float, rate: float | None
) -> None:
    assert greatest_rate_served(runs, share) == rate
