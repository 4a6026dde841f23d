"""Streams of the chaos tests: requests with the ids that an undisturbed run gave, and what became of each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import grpc
from factories.chaos.deployment import CREDENTIALS, Deployment
from factories.servers.router import Answer
from penstock.common.errors import from_rpc_error
from penstock.common.request_context import REQUEST_ID_KEY
from penstock.v1 import config_pb2, text_pb2

TOKENS = 250
_TRIES = 5
# What no log, metric or detail may hold. It is part of every prompt.
CANARY = "zebraquartz 70418"
SAMPLINGS = {
    "greedy": config_pb2.GenerationConfig(max_new_tokens=TOKENS),
    "seeded": config_pb2.GenerationConfig(max_new_tokens=TOKENS, do_sample=True, temperature=1.1, seed=7),
}


def asking(sampling: str, number: int = 0) -> text_pb2.GenerateTextRequest:
    """A request for TOKENS tokens; each number has a prompt of its own."""
    return text_pb2.GenerateTextRequest(
        text=f"{number} {CANARY}: count from 1 to 20.",
        config=SAMPLINGS[sampling],
        stop=config_pb2.StopConfig(ignore_eos=True),
        output=config_pb2.OutputConfig(return_token_ids=True),
    )


@dataclass
class Stream:
    """A call: its answer as far as it came, the times of its deltas, and its error if it had one."""

    deployment: Deployment
    sampling: str
    number: int = 0
    # In place of what `asking` makes.
    asked: text_pb2.GenerateTextRequest | None = None
    answer: Answer = field(default_factory=Answer)
    times: list[float] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    async def run(
        self,
        on_delta: Callable[[Stream], Awaitable[Any]] | None = None,
        *,
        timeout: float | None = None,
        stop_after: int = TOKENS + 1,
    ) -> Stream:
        """Read it to its end, or cancel it after so many ids; `on_delta` is awaited after each delta."""
        self.deployment.calls += 1
        is_seen = False
        asked = self.asked or asking(self.sampling, self.number)
        call = self.deployment.client.Generate(asked, timeout=timeout, metadata=CREDENTIALS)
        try:
            async for event in call:
                is_seen = True
                self.answer.add(event)
                if event.HasField("delta"):
                    self.times.append(time.monotonic())
                    if len(self.ids) >= stop_after:
                        call.cancel()
                        return self
                    if on_delta is not None:
                        await on_delta(self)
        except grpc.aio.AioRpcError as error:
            self.error = error
            trailers = tuple(error.trailing_metadata() or ())
            # A deadline may have passed before the call left this process: then the error is of its own making.
            is_seen = is_seen or any(key == REQUEST_ID_KEY for key, _ in trailers)
            self.deployment.told += [str(error.details()), *(str(one) for one in trailers)]
        finally:
            self.deployment.seen_calls += is_seen
        return self

    @property
    def ids(self) -> list[int]:
        """Ids so far."""
        return self.answer.ids()

    @property
    def reason(self) -> str:
        """Reason of its error, or ''."""
        return from_rpc_error(self.error).reason if self.error is not None else ""

    def longest_pause(self, since: float) -> float:
        """Longest time without a delta that ended after `since`, in seconds."""
        later = [since, *(moment for moment in self.times if moment > since)]
        return max((after - before for before, after in pairwise(later)), default=0.0)


class Undisturbed:
    """Ids that each request has when nothing is wrong; each is asked for once."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], list[int]] = {}
        self.texts: list[str] = []

    async def ids(self, deployment: Deployment, sampling: str, number: int = 0) -> list[int]:
        """Ids of a request. The first call must come while nothing is wrong."""
        key = (sampling, number)
        if key not in self._ids:
            stream = await _unmoved(Stream(deployment, sampling, number))
            assert len(stream.ids) == TOKENS
            self._ids[key] = stream.ids
            self.texts.append(stream.answer.text())
        return self._ids[key]


async def _unmoved(stream: Stream) -> Stream:
    """Run a stream, and again where it was moved: a machine that stood still is a fault, too."""
    for _ in range(_TRIES):
        done = await replace(stream, answer=Answer(), times=[]).run()
        assert done.error is None, done.error
        if done.answer.finished.attempts == 1:
            return done
    raise AssertionError(f"of {_TRIES} streams none ended where it began, though nothing was done to them")
