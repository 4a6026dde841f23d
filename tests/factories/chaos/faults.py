"""Faults of the chaos tests, as rows: what is done to the backend that runs a stream, and what must come of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from factories.chaos.deployment import MAX_MOVES, STALL_SECONDS, Backend, Deployment
from factories.chaos.streams import TOKENS, Stream, Undisturbed

SESSION = b"/penstock.v1.GenerationService/Session"
# Other streams that run beside the one that is looked at.
NEIGHBOURS = 3
# A fault that no longer met its stream is tried again, at another moment.
_MISSES = 20


@dataclass(frozen=True)
class Fault:
    """One row. `inflict` hurts a backend amid its stream."""

    name: str
    inflict: Callable[[Backend, random.Random], None]
    # The stream has gone on elsewhere; False: it stays, or moves.
    moves: bool = True
    # Ends the process so.
    exit_code: int | None = None
    # Nobody is told but by silence.
    silent: bool = False
    # The one reason by which streams may end instead of going on.
    reason: str = ""
    transports: tuple[str, ...] = ("asyncio", "grpc")


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("step hangs", lambda one, _: one.order("engine.step.hang"), silent=True),
        Fault("step raises", lambda one, _: one.order("engine.step.raise"), exit_code=1),
        Fault("step kills", lambda one, _: one.order("engine.step.kill"), exit_code=-signal.SIGKILL),
        Fault("step without numbers", lambda one, _: one.order("engine.step.nan"), False, reason="MODEL_OUTPUT_NAN"),
        Fault("kill -9", lambda one, _: one.send(signal.SIGKILL), exit_code=-signal.SIGKILL),
        Fault("SIGTERM", lambda one, _: one.send(signal.SIGTERM), False, exit_code=0),
        Fault("SIGSTOP", lambda one, _: one.send(signal.SIGSTOP), silent=True),
        Fault("black hole", lambda one, _: one.proxy.freeze(), silent=True),
        # With grpc.aio the session shares its connection, so that this is the black hole.
        Fault(
            "session dark",
            lambda one, _: one.proxy.freeze(SESSION),
            silent=True,
            transports=("asyncio",),
        ),
        Fault("connections reset", lambda one, _: one.proxy.reset()),
        Fault("reset after n bytes", lambda one, rng: one.proxy.reset_after(rng.randrange(1, 1500))),
        Fault("delay of 50 ms", lambda one, _: one.proxy.slow_down(delay_seconds=0.05), False),
        Fault("20 kB/s", lambda one, _: one.proxy.slow_down(bytes_per_second=20e3), False),
    )
}


@dataclass(frozen=True)
class Seen:
    """Outcome of one try: whether every stream was exact, and the longest time without a token, in seconds."""

    exact: bool
    pause: float
    attempts: int


async def strike(
    fault: Fault, deployment: Deployment, undisturbed: Undisturbed, sampling: str, rng: random.Random
) -> Seen:
    """Let `fault` meet a stream at a random token, mend it, and hold every answer to the undisturbed ones.

    Raises AssertionError when a stream is otherwise than the contract allows.
    """
    wanted = [await undisturbed.ids(deployment, sampling, number) for number in range(NEIGHBOURS + 1)]
    for _ in range(_MISSES):
        moment = rng.randrange(1, TOKENS // 2)
        owner: list[Backend] = []
        struck: list[float] = []
        beside: list[asyncio.Task[Stream]] = []
        losses = await deployment.losses()

        async def on_delta(
            stream: Stream,
            moment: int = moment,
            owner: list[Backend] = owner,
            struck: list[float] = struck,
            beside: list[asyncio.Task[Stream]] = beside,
        ) -> None:
            if not owner:
                owner.append(await deployment.owner())
                beside += [
                    asyncio.ensure_future(Stream(deployment, sampling, number).run())
                    for number in range(1, NEIGHBOURS + 1)
                ]
            if not struck and len(stream.ids) >= moment:
                struck.append(time.monotonic())
                fault.inflict(owner[0], rng)

        main = await Stream(deployment, sampling).run(on_delta)
        streams = [main, *await asyncio.gather(*beside)]
        await owner[0].mend(fault.exit_code)
        await deployment.until_whole()
        if await deployment.losses() - losses > MAX_MOVES:
            # The machine stood still for longer than the stall timeout, and more backends were lost than the fault
            # took: a stream that was moved so often may end.
            continue
        for stream, ids in zip(streams, wanted, strict=True):
            _judge(fault, stream, ids)
        # What came before the fault's first effect is no answer to it: a stream that had ended, a backend unhurt.
        if fault.moves and main.answer.finished.attempts == 1:
            continue
        attempts = main.answer.finished.attempts if main.error is None else 1
        return Seen(all(one.error is None for one in streams), main.longest_pause(struck[0]), attempts)
    raise AssertionError(f"{fault.name} met no stream in {_MISSES} tries")


def _judge(fault: Fault, stream: Stream, wanted: list[int]) -> None:
    if stream.error is not None:
        told = f"{stream.error.code()} {stream.reason} {stream.error.details()}"
        assert stream.reason == (fault.reason or "none may end"), f"{fault.name}: a stream ended by {told}"
        assert stream.error.code() is grpc.StatusCode.INTERNAL
        assert stream.ids == wanted[: len(stream.ids)], f"{fault.name}: other ids before the end"
        return
    assert stream.ids == wanted, f"{fault.name}: other ids than undisturbed"


# Longest pause of a silent fault that the contract allows.
LONGEST_PAUSE_SECONDS = STALL_SECONDS + 1.0
