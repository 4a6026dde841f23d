"""Invariants that hold after every case: nothing is held, nothing was lost, nothing leaked, answers are the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil
from factories.chaos.deployment import Deployment, Figures
from factories.chaos.streams import CANARY, Stream, Undisturbed

# How far threads and descriptors may be from what they were.
SLACK = 2
PATIENCE_SECONDS = 120.0
# A piece of an answer that is no word of a log.
_PIECE = slice(20, 60)


@dataclass(frozen=True)
class Held:
    """Threads and descriptors of one process."""

    pid: int
    threads: int
    descriptors: int

    @staticmethod
    def by(pid: int) -> Held:
        """Count them."""
        process = psutil.Process(pid)
        return Held(pid, process.num_threads(), process.num_fds())


@dataclass(frozen=True)
class Counts:
    """Counters of accepted and ended work, as deltas of them must be equal."""

    # Calls to Generate that the router began.
    calls: int
    sent: dict[str, float]
    # Refused ones, too.
    ended: dict[str, float]
    # Losses of the backend: what is on its way then may never come there.
    losses: dict[str, float]


# Words of the exceptions that faults order. A step that failed of itself has a line of its own besides the one of the
# call that it ended.
_ORDERED = ("FailpointError", "MODEL_OUTPUT_NAN", '"reason": "STEP_FAILED"')


def _is_broken(line: str) -> bool:
    """True for a line of a log about an exception that no fault ordered."""
    is_exception = '"exception": ' in line or line.startswith("Traceback")
    return is_exception and not any(word in line for word in _ORDERED)


async def _until_quiet(look: Callable[[], Awaitable[str]], seconds: float) -> None:
    """Wait until there is no complaint. Raises AssertionError with the last one."""
    until = time.monotonic() + seconds
    while complaint := await look():
        assert time.monotonic() < until, complaint
        await asyncio.sleep(0.05)


class Invariants:
    """Checker of one deployment. `hold` waits for rest, then checks."""

    def __init__(self, deployment: Deployment, undisturbed: Undisturbed) -> None:
        self._deployment = deployment
        self._undisturbed = undisturbed
        self._held: dict[str, Held] = {}
        # Of the end of the case before.
        self.counts: Counts | None = None

    async def hold(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Check all of them. Raises AssertionError naming what does not hold.

        `patience_seconds`: time that counts may take to be equal once everything is at rest.
        """
        await self._deployment.until_whole()
        await self._canary()
        await _until_quiet(self._unrest, PATIENCE_SECONDS)
        await _until_quiet(self._wrong, patience_seconds)
        # What a process that is new holds is what the next case is compared with; of the others it never drifts.
        for name, process in self._deployment.processes.items():
            held = Held.by(process.popen.pid)
            if name not in self._held or self._held[name].pid != held.pid:
                self._held[name] = held
        self.counts = await self._count()
        # What never reached the router was given up before, and will not come any more.
        self._deployment.calls = self._deployment.seen_calls = self.counts.calls
        await self._nothing_told()

    async def _canary(self) -> None:
        samplings = ("greedy", "seeded")
        for answer in await asyncio.gather(*(Stream(self._deployment, sampling).run() for sampling in samplings)):
            wanted = await self._undisturbed.ids(self._deployment, answer.sampling)
            assert answer.error is None, f"canary: {answer.error}"
            assert answer.ids == wanted, "the canary's ids are others than before"

    async def _unrest(self) -> str:
        """Return what is held or runs."""
        for place, backend in enumerate(self._deployment.backends):
            load = await backend.load()
            if load.kv_blocks_used or load.host_blocks_used or load.running_requests or load.waiting_requests:
                blocks = f"{load.kv_blocks_used} blocks, {load.host_blocks_used} in the host pool"
                return f"generation {place} holds {blocks}, {load.running_requests} requests"
        router = await Figures.read(self._deployment.router)
        for name in ("running", "waiting"):
            if value := router.total(f"penstock_router_num_requests_{name}"):
                return f"the router has {value:g} requests {name}"
        tokenizer = await Figures.read(self._deployment.tokenizer)
        for name in ("queue_depth", "sequences"):
            if value := tokenizer.total(f"penstock_tokenizer_{name}"):
                return f"the tokenizer's {name} is {value:g}"
        return ""

    async def _wrong(self) -> str:
        """Return the work that was lost, or what leaked."""
        return await self._lost_work() or self._leaks()

    async def _lost_work(self) -> str:
        router, tokenizer = await Figures.read(self._deployment.router), await Figures.read(self._deployment.tokenizer)
        calls = router.total("grpc_server_started_total", grpc_method="Generate")
        ended = router.total("grpc_server_handled_total", grpc_method="Generate")
        told = router.total("penstock_router_requests_total", method="Generate")
        made, seen = self._deployment.calls, self._deployment.seen_calls
        if not (seen <= calls <= made and calls == ended == told):
            did = f"began {calls:g}, ended {ended:g}, counted {told:g}"
            return f"of {made} calls {seen} had an answer, and the router {did}"
        begun = tokenizer.total("grpc_server_started_total", grpc_type="unary")
        if begun != (done := tokenizer.total("grpc_server_handled_total", grpc_type="unary")):
            return f"the tokenizer began {begun:g} calls and ended {done:g}"
        if self.counts is None:
            return ""
        now = await self._count()
        for name, sent in now.sent.items():
            if self._held[name].pid != self._deployment.processes[name].popen.pid:
                continue
            sent -= self.counts.sent[name]
            ended = now.ended[name] - self.counts.ended[name]
            was_lost = now.losses[name] > self.counts.losses[name]
            if ended > sent or (ended < sent and not was_lost):
                return f"{name} was sent {sent:g} requests and ended {ended:g}"
        return ""

    async def _count(self) -> Counts:
        router = await Figures.read(self._deployment.router)
        sent, ended, losses = {}, {}, {}
        for place, backend in enumerate(self._deployment.backends):
            name, own = f"generation {place}", await Figures.read(backend.process)
            sent[name] = router.total("penstock_router_backend_requests_total", backend=backend.proxy.address)
            losses[name] = router.total("penstock_router_backend_losses_total", backend=backend.proxy.address)
            ended[name] = own.total("penstock_request_success_total") + own.total("penstock_requests_refused_total")
        calls = router.total("grpc_server_started_total", grpc_method="Generate")
        return Counts(int(calls), sent, ended, losses)

    def _leaks(self) -> str:
        for name, process in self._deployment.processes.items():
            before, now = self._held.get(name), Held.by(process.popen.pid)
            if before is None or before.pid != now.pid:
                continue
            for kind in ("threads", "descriptors"):
                was, found = getattr(before, kind), getattr(now, kind)
                if abs(found - was) > SLACK:
                    return f"{name} has {found} {kind}, before {was}"
        return ""

    async def _nothing_told(self) -> None:
        secrets = [CANARY, *(text[_PIECE] for text in self._undisturbed.texts)]
        places = {"an error's details": "\n".join(self._deployment.told)}
        for name, process in self._deployment.processes.items():
            places[f"the log of the {name}"] = process.output()
            places[f"the metrics of the {name}"] = (await Figures.read(process)).text
        for number, backend in enumerate(self._deployment.backends):
            places[f"the log of the generation {number} before"] = backend.past_output
        for place, text in places.items():
            broken = [line for line in text.splitlines() if _is_broken(line)]
            assert not broken, f"{place} has an error that no fault ordered: {broken[0][:500]}"
            for secret in secrets:
                assert secret not in text, f"{place} tells a prompt or an answer"
        self._deployment.told.clear()
