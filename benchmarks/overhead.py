"""Time that router and tokenizer add to a direct call of GenerationService, with the demo model.

Starts real processes, then alternates rounds of direct and routed requests (same prompts, same lengths, same
concurrency), so that both see the same machine. Figures are client-side, in milliseconds.

    python -m benchmarks overhead --streams 8 --rounds 6 --out overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from factories.servers.stack import Stack
from penstock.v1 import (
    config_pb2,
    generation_pb2,
    generation_pb2_grpc,
    text_pb2,
    text_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

from benchmarks._arguments import at_least
from benchmarks._report import Report, percentile

PROMPTS = [f"Tell me about Penstock, number {i}." for i in range(64)]


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, between deltas, and per token of a decode (where merged deltas cannot hide)."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """p50 and p99 in milliseconds."""
        return {
            "ttft_p50_ms": percentile(self.first, 0.50) * 1e3,
            "ttft_p99_ms": percentile(self.first, 0.99) * 1e3,
            "itl_p50_ms": percentile(self.between, 0.50) * 1e3,
            "itl_p99_ms": percentile(self.between, 0.99) * 1e3,
            "tpot_p50_ms": percentile(self.per_token, 0.50) * 1e3,
            "tpot_p99_ms": percentile(self.per_token, 0.99) * 1e3,
            "requests": len(self.first),
            "deltas": len(self.first) + len(self.between),
        }


async def _consume(call: AsyncIterator[Any], samples: Samples, tokens: int) -> None:
    start = last = begun = time.perf_counter()
    seen = 0
    async for message in call:
        if message.WhichOneof("event") != "delta":
            continue
        now = time.perf_counter()
        if seen == 0:
            samples.first.append(now - start)
            begun = now
        else:
            samples.between.append(now - last)
        last, seen = now, seen + 1
    samples.per_token.append((last - begun) / (tokens - 1))


def _config(tokens: int) -> config_pb2.GenerationConfig:
    return config_pb2.GenerationConfig(max_new_tokens=tokens, do_sample=False)


class Bench:
    """Stubs of a running stack, and the two kinds of request."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        self.tokens = tokens
        self.channels = [
            grpc.aio.insecure_channel(address)
            for address in (stack.address, stack.generations[0].address, stack.tokenizer.address)
        ]
        self.text: Any = text_pb2_grpc.TextServiceStub(self.channels[0])
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channels[1])
        self.tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self.channels[2])
        self.ids: dict[str, list[int]] = {}

    async def prepare(self) -> None:
        """Render every prompt once, for the direct requests."""
        for prompt in PROMPTS:
            message = tokenizer_pb2.Message(role="user", content=prompt)
            response = await self.tokenizer.ApplyChatTemplate(
                tokenizer_pb2.ApplyChatTemplateRequest(messages=[message])
            )
            self.ids[prompt] = list(response.token_ids)

    async def direct(self, prompt: str, samples: Samples) -> None:
        """One request to GenerationService."""
        stop = config_pb2.StopConfig(ignore_eos=True)
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=self.ids[prompt], config=_config(self.tokens), stop=stop
        )
        await _consume(self.generation.Generate(request), samples, self.tokens)

    async def routed(self, prompt: str, samples: Samples) -> None:
        """The same request through router and tokenizer. Ids are asked for, so that every token has its delta."""
        request = text_pb2.ChatRequest(
            messages=[tokenizer_pb2.Message(role="user", content=prompt)],
            config=_config(self.tokens),
            stop=config_pb2.StopConfig(ignore_eos=True),
            output=config_pb2.OutputConfig(return_token_ids=True),
        )
        await _consume(self.text.Chat(request), samples, self.tokens)

    async def round(self, kind: Any, streams: int, per_stream: int, samples: Samples) -> None:
        """`streams` concurrent callers of `per_stream` requests each."""

        async def caller(number: int) -> None:
            for i in range(per_stream):
                await kind(PROMPTS[(number * per_stream + i) % len(PROMPTS)], samples)

        await asyncio.gather(*(caller(number) for number in range(streams)))


async def run(arguments: argparse.Namespace, stack: Stack) -> dict[str, Any]:
    """Warm up, then alternate direct and routed rounds."""
    bench = Bench(stack, arguments.tokens)
    await bench.prepare()
    for kind in (bench.direct, bench.routed):
        await bench.round(kind, arguments.streams, 1, Samples())
    direct, routed = Samples(), Samples()
    for _ in range(arguments.rounds):
        await bench.round(bench.direct, arguments.streams, arguments.per_stream, direct)
        await bench.round(bench.routed, arguments.streams, arguments.per_stream, routed)
    for channel in bench.channels:
        await channel.close()
    first, second = direct.summary(), routed.summary()
    added = {key: second[key] - first[key] for key in first if key.endswith("_ms")}
    return {"direct": first, "routed": second, "added": added}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--streams", type=at_least(1), default=8, help="concurrent streams")
    parser.add_argument("--per-stream", type=at_least(1), default=4, help="requests of each stream in a round")
    parser.add_argument("--rounds", type=at_least(1), default=6, help="rounds of each kind")
    parser.add_argument("--tokens", type=at_least(2), default=48, help="output tokens of a request")
    parser.add_argument("--router-flags", default="", help="flags of `penstock serve router`")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    with Stack(router_flags=tuple(shlex.split(arguments.router_flags))) as stack:
        results = asyncio.run(run(arguments, stack))
    report.write({"settings": report.settings, **results})
