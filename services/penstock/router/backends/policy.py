"""Choice of a request's backend: its session's, else the longest cached prefix, else the least load.

Affinity yields to load: a backend that is clearly busier than the idlest one is not preferred for its cache, because
recomputing a prefix costs less than waiting behind others. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.router.backends.candidate_list import CandidateList
from penstock.router.backends.prefix_holders import PrefixHolders
from penstock.router.backends.prefix_index import BlockNames


class CandidateLoad(Protocol):
    """Load of a backend, as seen by the policy."""

    def standing(self, *, is_idle_only: bool) -> float | None:
        """Number of requests that a new one waits for, ours that it has not reported yet included; None: it would be
        refused. One that uses idle capacity only waits for all, another not for those that do."""

    @property
    def kv_pressure(self) -> float:
        """Share of KV blocks held by running requests, 0 to 1."""


class Candidate(Protocol):
    """A backend, as seen by the policy."""

    @property
    def key(self) -> str:
        """Key that is unique among backends."""

    @property
    def load(self) -> CandidateLoad:
        """Load of the backend."""

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that it probably has cached."""


CandidateT = TypeVar("CandidateT", bound=Candidate)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Limits of affinity: load of `factor` times the least load plus `slack` requests, and KV in use."""

    slack: float = 4.0
    factor: float = 1.5
    max_kv_pressure: float = 0.9
    max_sessions: int = 65536
    # Backends that are looked at for a request, and those that are known to have a prefix of it.
    most_looked_at: int = 8
    max_prefixes: int = 65536


class Policy(Generic[CandidateT]):
    """Chooses backends, and remembers each session's; the least recently used session is forgotten first."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = self._window = 0
        self._holders: PrefixHolders[CandidateT] = PrefixHolders(config.max_prefixes)
        # Another engine told of blocks: by their names without a salt.
        self._has_plain = False

    def choose(
        self,
        candidates: Sequence[CandidateT],
        hashes: Sequence[int],
        *,
        session: str = "",
        avoid: Collection[str] = (),
        is_idle_only: bool = False,
    ) -> CandidateT | None:
        """Choose a backend; None when every candidate is full or there is none.

        Of a CandidateList the time does not grow with their number, of another sequence it does. `avoid` names backends
        that this request was lost on: used only when nothing else is there. `is_idle_only`: it waits for all that are
        there; other requests do not wait for those of idle capacity.
        """
        is_crowd = len(candidates) > self._config.most_looked_at
        usable: list[tuple[float, CandidateT]] = []
        if is_crowd:
            crowd = candidates if isinstance(candidates, CandidateList) else CandidateList(candidates)
            usable = _usable(self._some_of(crowd, hashes, session), avoid, is_idle_only)
        if not usable or (avoid and all(one.key in avoid for _, one in usable)):
            usable = _usable(candidates, avoid, is_idle_only)
        if not usable:
            return None
        chosen = self._of_session(usable, session) if session else None
        if chosen is None:
            chosen = self._of_prefix(usable, hashes) or self._least_loaded(usable)
        if is_crowd:
            self._holders.add(hashes, chosen)
        if session:
            self._sessions[session] = chosen.key
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._config.max_sessions:
                self._sessions.popitem(last=False)
        return chosen

    def note_kept(self, candidate: CandidateT, names: Sequence[int], *, is_plain: bool = False) -> None:
        """Note blocks that a backend told of: where many are, it is asked for prompts with these. `is_plain`: their
        names are without a salt."""
        self._has_plain |= is_plain
        self._holders.note(names, candidate)

    def _some_of(self, crowd: CandidateList[CandidateT], hashes: Sequence[int], session: str) -> list[CandidateT]:
        """Return the next ones in turn, those that have a beginning of the prompt, and the session's.

        The least loaded of these is nearly the least loaded of all, and the time to choose does not grow.
        """
        count, most = len(crowd), self._config.most_looked_at
        begin = self._window = (self._window + most) % count
        some = crowd[begin : begin + most]
        if begin + most > count:
            some += crowd[: begin + most - count]
        # In order and once each, so that a choice can be repeated.
        keys = dict.fromkeys([one.key for one in self._holders.of(hashes)])
        if self._has_plain and isinstance(hashes, BlockNames):
            keys.update(dict.fromkeys([one.key for one in self._holders.of(hashes.plain)]))
        if session and (key := self._sessions.get(session)) is not None:
            keys[key] = None
        if keys:
            places = crowd.places
            for one in keys:
                # One that is gone, or cannot do this, is no candidate.
                place = places.get(one)
                if place is not None and (place - begin) % count >= most:
                    some.append(crowd[place])
        return some

    def _of_session(self, usable: Sequence[tuple[float, CandidateT]], session: str) -> CandidateT | None:
        key = self._sessions.get(session)
        return None if key is None else next((candidate for _, candidate in usable if candidate.key == key), None)

    def _of_prefix(self, usable: list[tuple[float, CandidateT]], hashes: Sequence[int]) -> CandidateT | None:
        if not hashes or len(usable) == 1:
            return usable[0][1] if len(usable) == 1 else None
        bound = min([requests for requests, _ in usable]) * self._config.factor + self._config.slack
        best: list[tuple[float, CandidateT]] = []
        best_match = 1
        for requests, candidate in usable:
            if requests > bound or (match := candidate.match(hashes)) < best_match:
                continue
            if candidate.load.kv_pressure > self._config.max_kv_pressure:
                continue
            if match > best_match:
                best, best_match = [], match
            best.append((requests, candidate))
        # Of several that have as much, the first in the list would get every request of a prompt that all know.
        return self._least_loaded(best) if len(best) > 1 else best[0][1] if best else None

    def _least_loaded(self, usable: list[tuple[float, CandidateT]]) -> CandidateT:
        # Equal candidates take turns, or the first in the list would get every request of an idle cluster.
        self._turn += 1
        turn, least = self._turn % len(usable), min([requests for requests, _ in usable])
        idle = [candidate for requests, candidate in usable[turn:] + usable[:turn] if requests == least]
        return min(idle, key=lambda candidate: round(candidate.load.kv_pressure, 2)) if len(idle) > 1 else idle[0]


def _usable(
    candidates: Sequence[CandidateT], avoid: Collection[str], is_idle_only: bool
) -> list[tuple[float, CandidateT]]:
    """Return those with room, each with the number of requests that count; without those to avoid, unless there are no
    others."""
    free = [
        (requests, one) for one in candidates if (requests := one.load.standing(is_idle_only=is_idle_only)) is not None
    ]
    if avoid:
        free = [one for one in free if one[1].key not in avoid] or free
    return free
