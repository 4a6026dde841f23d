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
    # Factor of forecasts before they are compared with a deadline; larger while newcomers wait.
    headroom: float = 1.0
    # True: a newcomer waits for others.
    is_busy: bool = False
    # Tokens of waiting requests, by tenant.
    waiting: Mapping[str, float] = MappingProxyType({})
    # Seconds by which the running requests will end later than evenly: they began together, so no place is free before.
    uneven_seconds: float = 0.0

    def output(self, demand: Demand) -> float:
        """Output tokens to expect of each sequence of a request."""
        budget, bucket = demand.max_output_tokens, bucket_of(demand.max_output_tokens)
        share = self.output_shares[bucket] if bucket < len(self.output_shares) else 0.0
        return budget * share if share else min(budget, self.output_tokens)

    def tokens(self, demand: Demand) -> float:
        """Expected tokens of a request, which its tenant is charged."""
        return demand.prompt_tokens + demand.sequences * self.output(demand)

    def wait_seconds(self, demand: Demand, coming: Mapping[str, float] | None = None) -> float:
        """Seconds until the request starts; O(tenants). `coming`: tokens by tenant that the report does not have yet.

        Tenants take turns by tokens: before this request's turn each other tenant gets at most as much as its own.
        Nobody waits for requests of idle capacity.
        """
        before = {tenant: tokens for tenant, tokens in (coming or {}).items() if tenant != IDLE_TENANT}
        if not self.tokens_per_second or not (self.is_busy or before):
            return self.uneven_seconds
        waiting = dict(self.waiting)
        for tenant, tokens in before.items():
            waiting[tenant] = waiting.get(tenant, 0.0) + tokens
        share = waiting.pop(demand.tenant, 0.0) + self.tokens(demand)
        tokens = share + sum(min(tokens, share) for tokens in waiting.values())
        return tokens / self.tokens_per_second + self.uneven_seconds

    def serving_seconds(self, demand: Demand) -> float:
        """Seconds from a request's first step to its end, at the present speed."""
        return self._steps(demand) * self.step_seconds_of(demand)

    def step_seconds_of(self, demand: Demand) -> float:
        """Seconds from one step of a request to its next."""
        return self.full_step_seconds if demand.tenant in self.waiting else self.step_seconds

    def prompt_steps(self, demand: Demand) -> int:
        """Steps of the prompt alone."""
        return -(-demand.prompt_tokens // self.batch_tokens)

    def seconds_late(self, demand: Demand, left: float, coming: Mapping[str, float] | None = None) -> float:
        """Seconds by which the request would miss its deadline, `left` seconds from now; 0: it would not.

        It is also 0 for a request that does not wait and that even an idle engine could not end in time: refusing it
        gains nothing.
        """
        late = (self.wait_seconds(demand, coming) + self.serving_seconds(demand)) * self.headroom - left
        if not self.is_busy and self._steps(demand) * self.least_step_seconds * self.headroom > left:
            return 0.0
        return max(late, 0.0)

    def _steps(self, demand: Demand) -> float:
        return self.output(demand) + self.prompt_steps(demand)
