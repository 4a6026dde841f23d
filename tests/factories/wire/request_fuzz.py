"""Fuzzer of requests: random ones at every call of services that run. Each must end with a documented status.

Half of them are good requests with a few fields changed, half are drawn whole; every request is known by the seed of
the run and its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from factories.wire.good_requests import good_requests
from factories.wire.random_messages import CANARY, RandomMessages
from google.protobuf import descriptor_pool, message_factory
from penstock.v1 import common_pb2, generation_pb2

# Enough that neither a watch nor a long answer holds the others up.
AT_ONCE = 32
# A call ends by then whatever it asked for.
CALL_SECONDS = 5.0
# Of calls that never end by themselves.
WATCH_SECONDS = 0.05
# They would stop the very service.
_LEFT_OUT = ("Drain", "Pause", "Resume", "Reload", "Shutdown", "UnloadModel")
_BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
_BAD_NUMBERS = {code.value[0]: code.name for code in _BAD}
# Streams that OK ends only behind their last event.
_STREAMS = (
    "penstock.v1.TextService.Generate",
    "penstock.v1.TextService.Chat",
    "penstock.v1.GenerationService.Generate",
)
_ABORTED = common_pb2.FINISH_REASON_ABORTED
_SESSION = "penstock.v1.GenerationService.Session"


@dataclass
class Totals:
    """Counts of a run, and what was wrong."""

    requests: int = 0
    seconds: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    # Calls whose status grpc.aio's client lost, so that they were made again.
    asked_again: int = 0

    def __str__(self) -> str:
        rate = self.requests / self.seconds if self.seconds else 0.0
        lines = [f"{self.requests} requests, {rate:.0f} a second, {self.asked_again} asked again"]
        lines += [f"{method} {code}: {count}" for (method, code), count in sorted(self.outcomes.items())]
        return "\n".join([*lines, *self.problems[:40]])


@dataclass(frozen=True)
class _Target:
    address: str
    method: Any
    start: Any
    request: Any
    response: Any


class RequestFuzzer:
    """Sends requests to running services. `opened` makes it; belongs to one event loop."""

    def __init__(self, targets: Sequence[_Target], seed: int) -> None:
        self._targets = targets
        self._seed = seed
        self.totals = Totals()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, services: Mapping[str, Sequence[str]], seed: int) -> Any:
        """Make it for the block. `services`: names of gRPC services by the address of their server."""
        async with contextlib.AsyncExitStack() as stack:
            targets = []
            for address, names in services.items():
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
                targets += [_target(address, channel, method) for name in names for method in _methods(name)]
            yield cls(targets, seed)

    async def run(
        self, count: int, *, first: int = 0, every: int = 0, look: Callable[[], None] = lambda: None
    ) -> Totals:
        """Send requests `first` to `first + count - 1`, AT_ONCE at a time; call `look` after each `every` of them."""
        numbers, begin = iter(range(first, first + count)), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work(numbers, every, look))
        self.totals.seconds += time.perf_counter() - begin
        return self.totals

    def request(self, number: int) -> tuple[_Target, list[bytes]]:
        """Make a request of the run: its method, and the bytes of its messages."""
        target, name = self._targets[number % len(self._targets)], f"{self._seed} {number}"
        make = RandomMessages(name)
        messages = good_requests(target.method.full_name, random.Random(name)) if make.chance(0.5) else []
        if messages:
            return target, [make.damaged(make.changed(one).SerializeToString(), 40) for one in messages]
        count = 1 + (number % 3 if target.method.client_streaming else 0)
        return target, [make.damaged(make.message(target.request).SerializeToString()) for _ in range(count)]

    async def _work(self, numbers: Iterator[int], every: int, look: Callable[[], None]) -> None:
        for number in numbers:
            await self._ask(number)
            self.totals.requests += 1
            if every and self.totals.requests % every == 0:
                look()

    async def _ask(self, number: int) -> None:
        target, bodies = self.request(number)
        seconds = WATCH_SECONDS if target.method.name.startswith("Watch") else CALL_SECONDS
        answers: list[bytes] = []
        error: Any = None
        try:
            begun = target.start(iter(bodies) if target.method.client_streaming else bodies[0], timeout=seconds)
            if target.method.server_streaming:
                async for answer in begun:
                    answers.append(answer)  # noqa: PERF401  # those before an error count
            else:
                await begun
        except grpc.aio.AioRpcError as raised:
            error = raised
        if error is not None and target.method.client_streaming and lost_its_status(error):
            self.totals.asked_again += 1
            error = await asyncio.to_thread(_ask_again, target, bodies)
        code = grpc.StatusCode.OK if error is None else error.code()
        self.totals.outcomes[target.method.full_name.removeprefix("penstock.v1."), code.name] += 1
        for problem in (*_wrong_status(error, code), *_wrong_answers(target, answers, code)):
            self.totals.problems.append(f"{number} {target.method.full_name}: {problem}"[:300])


def _methods(service: str) -> list[Any]:
    found = descriptor_pool.Default().FindServiceByName(service)
    return [method for method in found.methods if not method.name.startswith(_LEFT_OUT)]


def _target(address: str, channel: grpc.aio.Channel, method: Any) -> _Target:
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    request, response = (message_factory.GetMessageClass(one) for one in (method.input_type, method.output_type))
    return _Target(address, method, getattr(channel, kind)(_path(method)), request, response)


def _path(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def lost_its_status(error: grpc.aio.AioRpcError) -> bool:
    """Return True when grpc.aio's client made the status up because a message could not be sent.

    A server may end a call whose request goes on: it sends its status and RST_STREAM (NO_ERROR). The core of grpc then
    fails the messages that are sent later, and grpc.aio sets INTERNAL for the first that fails, although the server's
    status is there and is not read yet (`_StreamRequestMixin._write`, grpcio 1.85). grpc.aio's own server gets the same
    from it, and `tests/integration/serving/test_early_status.py` shows that ours sends what it should.
    """
    what = error.debug_error_string() or ""
    return (
        error.details() == "Internal error from Core"
        and what.startswith('Failed "execute_batch": (<')
        and ("SendMessageOperation object" in what)
    )


def _ask_again(target: _Target, bodies: list[bytes]) -> grpc.RpcError | None:
    """Make a call by grpc's client of threads, which takes a status from its server alone."""
    with grpc.insecure_channel(target.address) as channel:
        try:
            for _ in channel.stream_stream(_path(target.method))(iter(bodies), timeout=CALL_SECONDS):
                pass
        except grpc.RpcError as error:
            return error
    return None


def _told(error: Any) -> Iterable[str]:
    yield error.details() or ""
    for _, value in error.trailing_metadata() or ():
        yield value if isinstance(value, str) else value.decode("utf-8", "replace")


def _wrong_status(error: Any, code: grpc.StatusCode) -> Iterable[str]:
    if code in _BAD:
        yield f"{code.name} {error.details()}"
    if error is not None and any(CANARY in text for text in _told(error)):
        yield "repeats the caller's text"


def _wrong_answers(target: _Target, answers: list[bytes], code: grpc.StatusCode) -> Iterable[str]:
    if target.method.full_name in _STREAMS:
        yield from _wrong_events([target.response.FromString(answer) for answer in answers], code)
    elif target.method.full_name == _SESSION:
        for answer in answers:
            for event in generation_pb2.SessionResponse.FromString(answer).events:
                error = event.error
                if error.code in _BAD_NUMBERS:
                    yield f"a request's {_BAD_NUMBERS[error.code]} {error.message}"
                if CANARY in error.message or CANARY.encode() in error.status_details:
                    yield "a request's error repeats the caller's text"


def _wrong_events(events: list[Any], code: grpc.StatusCode) -> Iterable[str]:
    """Points 1 to 3 of docs/guide/reliability.md."""
    kinds = [event.WhichOneof("event") for event in events]
    whole = ["started", *["delta"] * kinds.count("delta"), *["finished"] * (kinds[-1:] == ["finished"])]
    ends = [one.finish_reason for event in events[-1:] for one in event.finished.sequences]
    # Aborted by name, or late, while it waited for its turn.
    never_began = kinds == ["finished"] and (code is not grpc.StatusCode.OK or set(ends) == {_ABORTED})
    if kinds and kinds != whole and not never_began:
        yield f"{code.name} behind {kinds}, ends {ends}"
    if code is grpc.StatusCode.OK and kinds[-1:] != ["finished"]:
        yield f"OK without Finished, behind {kinds[-1:]}"
    seqs = [event.delta.seq for event in events if event.HasField("delta")]
    if seqs != list(range(len(seqs))):
        yield f"numbers of deltas {seqs}"
    if code is grpc.StatusCode.UNAVAILABLE and any(event.delta.token_ids or event.delta.text for event in events):
        yield "UNAVAILABLE after tokens"
