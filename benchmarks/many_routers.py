"""Prefixes found and load spread with one, two and twenty routers before the same backends, by the routers' own choice.

    python -m benchmarks many_routers [--routers 1,2,20] [--backends 8] [--requests 20000] [--load 0.8] [--adapters 0]

A simulation in simulated time, of one process: the policy, the views of load and the memory of prefixes are the
routers' own classes; backends are a queue, places and a cache of blocks with the engine's own log. Each row is run
twice: routers know what they sent themselves, and what backends tell with their reports (`told`). Prompts have one of
`--prefixes` beginnings of 16 blocks, the frequent ones first (Zipf), and 8 blocks of their own. A block that is not
cached costs 10 ms, an answer 1 s; it is told once its prompt is computed. A request is sent to a router at random, as a
balancer without knowledge does. Of two tenants one sends a sixth of the requests; with a load above 1 it waits for
nobody but its like where shares are fair.

With `--adapters` each beginning belongs to one of these adapters. Every other one is on a quarter of the backends, two
at least; the rest are nowhere. A router that knows no backend with a request's adapter has the idlest one load it. That
takes 0.5 s; others hear of it by their reports. `loads` are those that read files, `needless_loads` those of an adapter
that another backend had or was loading, `load_wait_s` the mean wait of requests for one.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.common.fair_order import FairOrder
from penstock.generation.engine.prefix_log import PrefixLog, PrefixReader
from penstock.router.backends.adapter_list import AdapterList
from penstock.router.backends.adapter_loading import idlest_first
from penstock.router.backends.candidate_list import CandidateList
from penstock.router.backends.load_report import LoadReport
from penstock.router.backends.load_view import LoadView
from penstock.router.backends.policy import Policy, PolicyConfig
from penstock.router.backends.prefix_index import PrefixIndex
from penstock.v1 import admin_pb2

from benchmarks._arguments import at_least, numbers
from benchmarks._report import Report

SHARED, OWN = 16, 8
BLOCK_SECONDS, ANSWER_SECONDS = 0.01, 1.0
# Requests that a backend runs at once; blocks that it caches, and that a router remembers of it.
PLACES, CACHED, KNOWN = 16, 2000, 65536
LIGHT, HEAVY = "light", "heavy"
LIGHT_SHARE = 1 / 6
REPORT_SECONDS = 0.1
LOAD_SECONDS = 0.5
HEADER = (
    "routers",
    "told",
    "found_share",
    "wait_mean_s",
    "wait_p99_s",
    "busiest_to_mean",
    "light_wait_s",
    "choice_us",
    "told_bytes_s",
    "loads",
    "needless_loads",
    "load_wait_s",
)


@dataclass
class SimulatedBackend:
    """True state of a backend."""

    key: str
    # By tenant, in the engine's own order of tenants.
    waiting: dict[str, deque[Request]] = field(default_factory=lambda: {LIGHT: deque(), HEAVY: deque()})
    order: FairOrder = field(default_factory=FairOrder)
    running: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    served: int = 0
    # As a BlockPool tells its log.
    on_register: list[Callable[[bytes], None]] = field(default_factory=list)
    on_forget: list[Callable[[bytes], None]] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    # Its adapters, the number of changes of them, and the loads that are under way: adapter -> end.
    adapters: set[str] = field(default_factory=set)
    adapters_version: int = 0
    loading: dict[str, float] = field(default_factory=dict)

    def add_adapter(self, name: str) -> None:
        """Have an adapter from now on."""
        self.loading.pop(name, None)
        if name not in self.adapters:
            self.adapters.add(name)
            self.adapters_version += 1

    def list_adapters(self) -> admin_pb2.ListAdaptersResponse:
        """Return its adapters as it tells them."""
        found = [admin_pb2.Adapter(name=name) for name in sorted(self.adapters)]
        return admin_pb2.ListAdaptersResponse(adapters=found, version=self.adapters_version)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting[request.tenant].append(request)
        self.order.wait(request.tenant)

    def next(self) -> Request | None:
        """Take the next request."""
        tenant = next(iter(self.order), None)
        if tenant is None:
            return None
        request = self.waiting[tenant].popleft()
        if not self.waiting[tenant]:
            self.order.stop_waiting(tenant)
        self.order.charge(tenant, 1.0)
        return request

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self.waiting.values()))

    def found(self, blocks: list[int]) -> int:
        """Return the number of leading blocks that are cached, and cache all of them."""
        count = next((at for at, one in enumerate(blocks) if one not in self.cache), len(blocks))
        for one in blocks:
            self.cache[one] = None
            self.cache.move_to_end(one)
        while len(self.cache) > CACHED:
            gone, _ = self.cache.popitem(last=False)
            if gone in self.told:
                self.told.remove(gone)
                self._call(self.on_forget, gone)
        return count

    def computed(self, blocks: list[int]) -> None:
        """Tell the log of blocks that are computed now, and still cached."""
        for one in blocks:
            if one in self.cache and one not in self.told:
                self.told.add(one)
                self._call(self.on_register, one)

    @staticmethod
    def _call(hearers: list[Callable[[bytes], None]], block: int) -> None:
        for hear in hearers:
            hear(block.to_bytes(8, "little"))


class SeenBackend:
    """A backend as one router sees it. Implements policy.Candidate."""

    def __init__(self, backend: SimulatedBackend, log: PrefixLog | None) -> None:
        self.backend, self.key = backend, backend.key
        self._reader = None if log is None else PrefixReader(log)
        self.told_bytes = 0
        self.in_flight = 0
        self.load = LoadView(lambda: self.in_flight, lambda: 0)
        self.prefixes = PrefixIndex(KNOWN)
        self.adapters = AdapterList()

    def match(self, hashes: Any) -> int:
        return self.prefixes.match(hashes)

    def report(self, policy: Policy[SeenBackend] | None) -> bool:
        """Take a report; the policy of a router with a crowd of backends hears of told blocks. True: it may have other
        adapters."""
        state = self.backend
        self.load.take(LoadReport(waiting_requests=state.num_waiting, running_requests=state.running))
        told = None if self._reader is None else self._reader.take()
        if told is not None:
            self.prefixes.take(told.kept, told.gone, begins_anew=told.begins_anew)
            self.told_bytes += 8 * (len(told.kept) + len(told.gone))
            if policy is not None:
                policy.note_kept(self, told.kept)
        return self.list_adapters()

    def list_adapters(self) -> bool:
        """Ask for its adapters where its report says that they changed; False where it does not."""
        state = self.backend
        if not self.adapters.note_version(state.adapters_version):
            return False
        self.adapters.take(state.list_adapters())
        return True


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes to a router. `adapter`: empty for none."""

    tenant: str
    blocks: list[int]
    adapter: str
    began: float


class SimulatedRouter:
    """A router: its policy, its backends, and the loads of adapters that it waits for."""

    def __init__(self, seen: Iterable[SeenBackend]) -> None:
        self.policy: Policy[SeenBackend] = Policy(PolicyConfig())
        self.seen = CandidateList(seen)
        # A router takes no requests before it knows these.
        for one in self.seen:
            one.list_adapters()
        # As a router's pool has them: those with an adapter, until a change.
        self._having: dict[str, CandidateList[SeenBackend]] = {}
        self.loads: dict[str, list[Arrival]] = {}
        # Loads that are under way by key of a backend.
        self.loading: Counter[str] = Counter()

    def candidates(self, adapter: str) -> CandidateList[SeenBackend]:
        """Return the backends that have an adapter, as far as it knows; all for none."""
        if not adapter:
            return self.seen
        if adapter not in self._having:
            self._having[adapter] = CandidateList(one for one in self.seen if adapter in one.adapters)
        return self._having[adapter]

    def forget_having(self) -> None:
        """Look again for backends with adapters."""
        self._having.clear()

    def report(self) -> None:
        """Take reports of all backends."""
        # As a router's pool does.
        policy = self.policy if len(self.seen) > PolicyConfig().most_looked_at else None
        for one in self.seen:
            if one.report(policy):
                self.forget_having()


@dataclass(frozen=True, slots=True)
class Request:
    """A request on its way."""

    tenant: str
    blocks: list[int]
    seen: SeenBackend
    began: float


class Simulation:
    """Routers before backends, until all requests are answered."""

    def __init__(self, routers: int, options: argparse.Namespace, *, told: bool) -> None:
        self._draw = random.Random(7)
        self._options, self._told = options, told
        self._backends = [SimulatedBackend(f"backend-{one}") for one in range(options.backends)]
        logs = [PrefixLog([one]) if told else None for one in self._backends]  # type: ignore[list-item]
        for number in range(0, options.adapters, 2):
            for copy in range(min(max(2, options.backends // 4), options.backends)):
                self._backends[(number + copy) % options.backends].add_adapter(f"adapter-{number}")
        self._routers = [SimulatedRouter(map(SeenBackend, self._backends, logs)) for _ in range(routers)]
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._found = self._possible = 0
        self._waits: dict[str, list[float]] = {LIGHT: [], HEAVY: []}
        self._choosing = 0.0
        self._loads = self._needless = 0
        self._load_waits: list[float] = []

    def run(self) -> dict[str, Any]:
        """Run it; return the row of the table."""
        options, now = self._options, 0.0
        weights = [1 / (rank + 1) for rank in range(options.prefixes)]
        usual = ANSWER_SECONDS + BLOCK_SECONDS * OWN
        rate = options.load * options.backends * PLACES / usual
        for number in range(options.requests):
            now += self._draw.expovariate(rate)
            (prefix,) = self._draw.choices(range(options.prefixes), weights)
            blocks = [prefix * 1000 + at for at in range(SHARED)]
            blocks += [10**9 + number * 1000 + at for at in range(OWN)]
            tenant = LIGHT if self._draw.random() < LIGHT_SHARE else HEAVY
            adapter = f"adapter-{prefix % options.adapters}" if options.adapters else ""
            self._at(now, Arrival(tenant, blocks, adapter, now))
        for at in range(len(self._routers)):
            # Reports come at their own times.
            self._at(self._draw.random() * REPORT_SECONDS, at)
        left = options.requests
        while left:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._routers[event].report()
                self._at(now + REPORT_SECONDS, event)
            elif callable(event):
                event()
            elif isinstance(event, Request):
                self._end(event, now)
                left -= 1
            else:
                self._begin(event, now)
        mean = options.requests / len(self._backends)
        waits = sorted(self._waits[LIGHT] + self._waits[HEAVY])
        return {
            "routers": len(self._routers),
            "told": self._told,
            "found_share": round(self._found / self._possible, 4),
            "wait_mean_s": round(sum(waits) / len(waits), 4),
            "wait_p99_s": round(waits[len(waits) * 99 // 100], 4),
            "busiest_to_mean": round(max(one.served for one in self._backends) / mean, 4),
            "light_wait_s": round(sum(self._waits[LIGHT]) / len(self._waits[LIGHT]), 4),
            "choice_us": round(1e6 * self._choosing / options.requests, 1),
            "told_bytes_s": round(self._told_bytes() / now),
            "loads": self._loads,
            "needless_loads": self._needless,
            "load_wait_s": round(sum(self._load_waits) / max(len(self._load_waits), 1), 4),
        }

    def _told_bytes(self) -> float:
        """Return what one router was told by one backend, on average."""
        seen = [one for router in self._routers for one in router.seen]
        return sum(one.told_bytes for one in seen) / len(seen)

    def _at(self, when: float, event: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _begin(self, arrival: Arrival, now: float) -> None:
        router = self._routers[self._draw.randrange(len(self._routers))]
        if router.candidates(arrival.adapter):
            self._place(router, arrival, now)
        elif arrival.adapter in router.loads:
            router.loads[arrival.adapter].append(arrival)
        else:
            router.loads[arrival.adapter] = [arrival]
            self._load(router, arrival.adapter, now)

    def _load(self, router: SimulatedRouter, adapter: str, now: float) -> None:
        """Have the idlest backend load an adapter. One that has it by now, or loads it for another router, answers when
        it has it."""
        seen = idlest_first(router.seen, router.loading)[0]
        backend = seen.backend
        router.loading[seen.key] += 1
        if adapter not in backend.adapters and adapter not in backend.loading:
            self._loads += 1
            self._needless += any(adapter in one.adapters or adapter in one.loading for one in self._backends)
            backend.loading[adapter] = now + LOAD_SECONDS
        end = backend.loading.get(adapter, now)
        self._at(end, partial(self._end_load, router, seen, adapter, end))

    def _end_load(self, router: SimulatedRouter, seen: SeenBackend, adapter: str, now: float) -> None:
        seen.backend.add_adapter(adapter)
        seen.adapters.add(admin_pb2.Adapter(name=adapter), seen.backend.adapters_version)
        router.loading[seen.key] -= 1
        router.forget_having()
        for arrival in router.loads.pop(adapter):
            self._load_waits.append(now - arrival.began)
            self._place(router, arrival, now)

    def _place(self, router: SimulatedRouter, arrival: Arrival, now: float) -> None:
        candidates, blocks = router.candidates(arrival.adapter), arrival.blocks
        begun = time.process_time()
        chosen = router.policy.choose(candidates, blocks)
        self._choosing += time.process_time() - begun
        assert chosen is not None
        chosen.prefixes.add(blocks)
        chosen.in_flight += 1
        chosen.backend.add(Request(arrival.tenant, blocks, chosen, arrival.began))
        self._start(chosen.backend, now)

    def _start(self, backend: SimulatedBackend, now: float) -> None:
        while backend.running < PLACES and (request := backend.next()) is not None:
            backend.running += 1
            backend.served += 1
            found = backend.found(request.blocks)
            self._found += min(found, SHARED)
            self._possible += SHARED
            self._waits[request.tenant].append(now - request.began)
            computed = now + BLOCK_SECONDS * (SHARED + OWN - found)
            self._at(computed, partial(backend.computed, request.blocks))
            self._at(computed + ANSWER_SECONDS, request)

    def _end(self, request: Request, now: float) -> None:
        request.seen.in_flight -= 1
        request.seen.backend.running -= 1
        self._start(request.seen.backend, now)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--routers", type=numbers, default=[1, 2, 20])
    parser.add_argument("--backends", type=at_least(1), default=8)
    parser.add_argument("--requests", type=at_least(100), default=20_000)
    parser.add_argument("--prefixes", type=at_least(1), default=300)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--adapters", type=at_least(0), default=0, help="that prompts belong to; 0: none")


def main(options: argparse.Namespace, report: Report) -> None:
    """Run it."""
    table, rows = report.table(HEADER), []
    for routers in options.routers:
        for told in (False, True):
            rows.append(Simulation(routers, options, told=told).run())
            table.row(*(rows[-1][name] for name in HEADER))
    report.save({"settings": report.settings, "rows": rows})
