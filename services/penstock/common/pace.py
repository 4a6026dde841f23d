"""Forecast of a request's time at an engine, from the engine's measurements. Pure: no clock, no I/O.

The engine measures the figures and checks requests against them. Its load reports carry them, so a router can refuse a
request that would be late before any work is done for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from penstock.common.idle_only import IDLE_TENANT

# Expected output tokens of a sequence before any answer was seen.
FIRST_GUESS_TOKENS = 256
# A request waits fully, for its headroom, when its wait is this part of the time that it is served: one fourth.
_WAITS_FULLY = 4.0
# Budgets are grouped by their power of two.
NUM_BUDGETS = 33


def bucket_of(budget: int) -> int:
    """Number of a budget's bucket, for `Pace.output_shares`."""
    return min(budget.bit_length(), NUM_BUDGETS - 1)


@dataclass(frozen=True, slots=True)
class Demand:
    """Size of a request. `max_output_tokens`: of one returned sequence; 0 for Score and Embed."""

    tenant: str
    prompt_tokens: int
    max_output_tokens: int
    sequences: int = 1


class Pace(NamedTuple):
    """Speed of an engine under its present load, and its waiting work. The default knows nothing and refuses nothing.

    A token belongs to a prompt or an output: it is the unit of waiting work, of throughput and of fairness. A tuple,
    since one is made in every step.
    """

    # Throughput while requests waited; 0: none has waited yet.
    tokens_per_second: float = 0.0
    # Time of a step that draws, lately, and when the engine has little to do.
    step_seconds: float = 0.0
    least_step_seconds: float = 0.0
    # Time between steps in which every tenant takes part: the pace of a tenant with waiting requests.
    full_step_seconds: float = 0.0
    # Mean output of a sequence; and for each `bucket_of` a budget, the share of it that outputs took (0: unknown).
    output_tokens: float = FIRST_GUESS_TOKENS
    output_shares: Sequence[float] = ()
    # Rows of one step.
    batch_tokens: int = 512
    # Factor of forecasts before they are compared with a deadline; and the further one of a request that waits.
    headroom: float = 1.0
    wait_headroom: float = 1.0
    # True: a newcomer waits for others.
    is_busy: bool = False
    # Tokens of waiting requests, by tenant.
    waiting: Mapping[str, float] = MappingProxyType({})
    # Seconds by which the running requests will end later than evenly: they began together, so no place is free before.
    uneven_seconds: float = 0.0
    # Sequences that would begin in the next step; 0 while newcomers wait, or where it is not told.
    free_places: int = 0

    def output(self, demand: Demand) -> float:
        """Output tokens to expect of each sequence of a request."""
        budget, bucket = demand.max_output_tokens, bucket_of(demand.max_output_tokens)
        share = self.output_shares[bucket] if bucket < len(self.output_shares) else 0.0
        return budget * share if share else min(budget, self.output_tokens)

    def tokens(self, demand: Demand) -> float:
        """Expected tokens of a request, which its tenant is charged."""
        return demand.prompt_tokens + demand.sequences * self.output(demand)

    def wait_seconds(self, demand: Demand, coming: Mapping[str, float] | None = None, since: float = 0.0) -> float:
        """Seconds until the request starts; O(tenants). `coming`: tokens by tenant that the report does not have yet.
        `since`: seconds since the figures were measured, in which the engine has gone on.

        Tenants take turns by tokens: before this request's turn each other tenant gets at most as much as its own.
        Nobody waits for requests of idle capacity.
        """
        before = {tenant: tokens for tenant, tokens in (coming or {}).items() if tenant != IDLE_TENANT}
        if not self.is_busy and not before:
            return 0.0
        own = self.tokens(demand)
        waiting = dict(self.waiting)
        for tenant, tokens in before.items():
            waiting[tenant] = waiting.get(tenant, 0.0) + tokens
        share = waiting.pop(demand.tenant, 0.0) + own
        tokens = share + sum(min(tokens, share) for tokens in waiting.values())
        # Those that find a place are taken to be of its size.
        placed = self.free_places * own / demand.sequences
        if tokens <= placed:
            return 0.0
        work = (tokens - placed) / self.tokens_per_second if self.tokens_per_second else 0.0
        return max(work + self.uneven_seconds - since, 0.0)

    def serving_seconds(self, demand: Demand) -> float:
        """Seconds from a request's first step to its end, at the present speed."""
        return self._steps(demand) * self.step_seconds_of(demand)

    def step_seconds_of(self, demand: Demand) -> float:
        """Seconds from one step of a request to its next."""
        return self.full_step_seconds if demand.tenant in self.waiting else self.step_seconds

    def prompt_steps(self, demand: Demand) -> int:
        """Steps of the prompt alone."""
        return -(-demand.prompt_tokens // self.batch_tokens)

    def headroom_of(self, wait_seconds: float, serving_seconds: float) -> float:
        """Factor on the forecast of a request with these times.

        A request that waits is accepted long before its end, and the machine may become slower until then. The factor
        grows with the wait. If it came with the first waiting request at once, a crowd that is accepted in one moment
        would be too much in the next, for all that come after it.
        """
        waited = min(_WAITS_FULLY * wait_seconds, serving_seconds) / serving_seconds if serving_seconds else 1.0
        return self.headroom * (1.0 + (self.wait_headroom - 1.0) * waited)

    def seconds_late(
        self, demand: Demand, left: float, coming: Mapping[str, float] | None = None, since: float = 0.0
    ) -> float:
        """Seconds by which the request would miss its deadline, `left` seconds from now; 0: it would not.

        It is also 0 for a request that does not wait and that even an idle engine could not end in time: refusing it
        gains nothing.
        """
        wait, serving = self.wait_seconds(demand, coming, since), self.serving_seconds(demand)
        late = (wait + serving) * self.headroom_of(wait, serving) - left
        if not self.is_busy and self._steps(demand) * self.least_step_seconds * self.headroom > left:
            return 0.0
        return max(late, 0.0)

    def _steps(self, demand: Demand) -> float:
        return self.output(demand) + self.prompt_steps(demand)
