"""Choice of a request's backend: its session's, else the longest cached prefix, else the least load.

Affinity yields to load: a backend that is clearly busier than the idlest one is not preferred for its cache, because
recomputing a prefix costs less than waiting behind others. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class CandidateLoad(Protocol):
    """Load of a backend, as seen by the policy."""

    @property
    def requests(self) -> float:
        """Number of requests that wait or run there, ours that it has not reported yet included."""

    @property
    def is_full(self) -> bool:
        """True when another request would be refused."""

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


class Policy(Generic[CandidateT]):
    """Chooses backends, and remembers each session's; the least recently used session is forgotten first."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = 0

    def choose(
        self,
        candidates: Sequence[CandidateT],
        hashes: Sequence[int],
        *,
        session: str = "",
        avoid: Collection[str] = (),
    ) -> CandidateT | None:
        """Choose a backend; None when every candidate is full or there is none.

        `avoid` names backends that this request was lost on: used only when nothing else is there.
        """
        usable = [candidate for candidate in candidates if not candidate.load.is_full]
        usable = [candidate for candidate in usable if candidate.key not in avoid] or usable
        if not usable:
            return None
        chosen = self._of_session(usable, session) or self._of_prefix(usable, hashes) or self._least_loaded(usable)
        if session:
            self._sessions[session] = chosen.key
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._config.max_sessions:
                self._sessions.popitem(last=False)
        return chosen

    def _of_session(self, usable: Sequence[CandidateT], session: str) -> CandidateT | None:
        key = self._sessions.get(session) if session else None
        return next((candidate for candidate in usable if candidate.key == key), None)

    def _of_prefix(self, usable: Sequence[CandidateT], hashes: Sequence[int]) -> CandidateT | None:
        if not hashes or len(usable) == 1:
            return usable[0] if len(usable) == 1 else None
        least = min(candidate.load.requests for candidate in usable)
        bound = least * self._config.factor + self._config.slack
        best: list[CandidateT] = []
        best_match = 1
        for candidate in usable:
            match, load = candidate.match(hashes), candidate.load
            if match < best_match or load.requests > bound or load.kv_pressure > self._config.max_kv_pressure:
                continue
            if match > best_match:
                best, best_match = [], match
            best.append(candidate)
        # Of several that have as much, the first in the list would get every request of a prompt that all know.
        return self._least_loaded(best) if len(best) > 1 else next(iter(best), None)

    def _least_loaded(self, usable: Sequence[CandidateT]) -> CandidateT:
        # Equal candidates take turns, or the first in the list would get every request of an idle cluster.
        self._turn += 1
        turn = self._turn % len(usable)
        rotated = [*usable[turn:], *usable[:turn]]
        return min(rotated, key=lambda candidate: (candidate.load.requests, round(candidate.load.kv_pressure, 2)))
