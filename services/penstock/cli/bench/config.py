"""Options of `penstock bench`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cli.client.connection import ConnectionConfig
from penstock.common.options import option

LOAD, REQUESTS, OBJECTIVES, REPORT = "Load", "Requests", "Objectives", "Report"


def lengths(text: str) -> tuple[int, int]:
    """Parse `128`, or `32-512` for uniformly random lengths: smallest and largest. Raises ValueError."""
    low, dash, high = text.partition("-")
    try:
        first, last = int(low), int(high if dash else low)
    except ValueError:
        raise ValueError("expected a number of tokens, or two with - between") from None
    if not 1 <= first <= last:
        raise ValueError("expected numbers of 1 or more, the smaller one first")
    return first, last


def rates(text: str) -> tuple[float, ...]:
    """Parse rates with commas, such as `1,2,4`. Raises ValueError."""
    try:
        found = tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ValueError("expected numbers with commas") from None
    if any(not 0.001 <= one <= 1e6 for one in found):
        raise ValueError("expected rates from 0.001 to 1000000")
    return found


def _checked_rates(text: str) -> str:
    rates(text)
    return text


def _checked(text: str) -> str:
    """Return `text` when `lengths` can parse it. Raises ValueError."""
    lengths(text)
    return text


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ConnectionConfig):
    """Configuration: the requests, their rate, and the objectives. Times count from when a request was due to start."""

    concurrency: int | None = option(
        None,
        "Closed loop: requests at a time; the next starts when one ends. 8 without --rate.",
        group=LOAD,
        minimum=1,
    )
    rate: float | None = option(
        None,
        "Open loop: requests a second, at random times (Poisson), whether the server keeps up or not.",
        group=LOAD,
        minimum=0.001,
        maximum=1e6,
    )
    rates: str | None = option(
        None,
        "Open loops of these rates, one after the other, each with its own --requests or --duration.",
        group=LOAD,
        metavar="NUMBER,…",
        parse=_checked_rates,
    )
    requests: int | None = option(
        None, "Requests to send; 64 without --duration.", group=LOAD, minimum=1, maximum=10_000_000
    )
    duration_seconds: float | None = option(
        None,
        "Time to send requests for; those that still run then may end.",
        group=LOAD,
        flag="--duration",
        minimum=0.1,
    )
    warmup: int = option(4, "Requests before the measured ones.", group=LOAD, minimum=0)
    max_open_requests: int = option(
        2048,
        "Open loop: most requests at a time; one beyond them counts as a failure of its own kind.",
        group=LOAD,
        minimum=1,
    )

    direct: bool = option(False, "The address is a generation service, not a router.", group=REQUESTS)
    text: bool = option(
        False, "Send words, about one for each token asked for, so that the tokenizer has work.", group=REQUESTS
    )
    dataset: str | None = option(
        None,
        "Prompts from a file, in random order, instead of random ones: JSON or JSON lines with `prompt`, `messages`, "
        "or `conversations` as in ShareGPT, and optionally `output_tokens`; any other file has a prompt on each line.",
        group=REQUESTS,
        metavar="FILE",
    )
    prompt_tokens: str = option("128", "Length of a prompt.", group=REQUESTS, metavar="N|MIN-MAX", parse=_checked)
    output_tokens: str = option("64", "Length of an output.", group=REQUESTS, metavar="N|MIN-MAX", parse=_checked)
    common_prefix_tokens: int = option(
        0, "Tokens that all prompts begin with, like a system prompt.", group=REQUESTS, minimum=0
    )
    stop_at_eos: bool = option(
        False, "Let the model end an output early; otherwise each output has its full length.", group=REQUESTS
    )
    model: str | None = option(
        None,
        "Model to use; when left out, the only one served.",
        group=REQUESTS,
        flag="--model",
        env="PENSTOCK_CHAT_MODEL",
    )
    adapter: str | None = option(
        None, "LoRA adapter of the model.", group=REQUESTS, env="PENSTOCK_CHAT_ADAPTER", metavar="NAME"
    )
    timeout_seconds: float | None = option(
        None, "Deadline of a request.", group=REQUESTS, flag="--timeout", minimum=0.001
    )
    seed: int = option(0, "Seed of lengths, prompts and arrivals.", group=REQUESTS)

    slo_ttft_seconds: float | None = option(
        None, "Goodput: the first token comes within this time.", group=OBJECTIVES, flag="--slo-ttft", minimum=0
    )
    slo_tpot_seconds: float | None = option(
        None,
        "Goodput: mean time for each token after the first is at most this.",
        group=OBJECTIVES,
        flag="--slo-tpot",
        minimum=0,
    )
    slo_total_seconds: float | None = option(
        None, "Goodput: the request ends within this time.", group=OBJECTIVES, flag="--slo-total", minimum=0
    )

    slo_share: float = option(
        0.99,
        "Share of the requests that must meet the objectives for one of --rates to count as served.",
        group=OBJECTIVES,
        minimum=0.01,
        maximum=1,
    )

    json: str | None = option(
        None, "Write the figures to this file as JSON; - is standard output.", group=REPORT, metavar="FILE"
    )
    plot: str | None = option(
        None, "Draw curves over --rates into this file: PNG, SVG or PDF by its suffix.", group=REPORT, metavar="FILE"
    )
    quiet: bool = option(False, "Show no progress.", group=REPORT)

    def __post_init__(self) -> None:
        from penstock.common.errors import StartupError  # imports grpc, which --help must not wait for

        given = [name for name in ("rate", "rates", "concurrency") if getattr(self, name) is not None]
        if len(given) > 1:
            raise StartupError(
                f"--{given[0]} and --{given[1]} contradict each other: --rate is an open loop, --rates are several, "
                "--concurrency is a closed one",
                flag=f"--{given[0]}",
            )
        shortest = lengths(self.prompt_tokens)[0]
        if 0 < shortest <= self.common_prefix_tokens:
            raise StartupError(
                f"--common-prefix-tokens {self.common_prefix_tokens} leaves a prompt of {shortest} tokens no tokens of "
                "its own",
                flag="--common-prefix-tokens",
            )
        if self.plot is not None and self.rates is None:
            raise StartupError("--plot draws curves over several rates: give --rates", flag="--plot")
        if self.dataset is not None and self.text:
            raise StartupError("--text makes up prompts and --dataset has its own: choose one of them", flag="--text")
        if self.direct and self.text:
            raise StartupError("--text needs a router: a generation service takes token ids", flag="--text")
        if self.direct and self.dataset is not None:
            raise StartupError("--dataset needs a router: a generation service takes token ids", flag="--dataset")

    @property
    def loads(self) -> list[BenchConfig]:
        """Load of each of --rates; without them, this one."""
        if self.rates is None:
            return [self]
        return [replace(self, rate=rate, rates=None, plot=None) for rate in rates(self.rates)]

    @property
    def num_requests(self) -> int | None:
        """Number of requests; None: no limit but --duration."""
        return 64 if self.requests is None and self.duration_seconds is None else self.requests

    @property
    def num_streams(self) -> int:
        """Number of streams of a closed loop."""
        return self.concurrency or 8
