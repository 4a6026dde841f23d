"""Shares of a tenant in an engine, as numbers: docs/learn/fairness.md lists what each is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.idle_only import IDLE_TENANT

if TYPE_CHECKING:
    from penstock.generation.engine.config import EngineConfig

# A tenant is a crowd with more than this many times the running sequences, or blocks, of the others' mean.
CROWD = 2.0


class TenantShares:
    """Shares of one tenant among others, by the configuration of its engine."""

    def __init__(self, config: EngineConfig) -> None:
        share = config.tenant_share
        # Most of its requests that wait, where tenants are told apart.
        self.queued_requests = max(1, int(share * config.max_queued_requests))
        # Most of its running sequences while there are others; a request that runs alone may have more.
        self.running_sequences = int(share * config.max_running_sequences)
        # Rows of a step while several tenants are there, unless a crowd rests in it. Prompts must progress beside all
        # decoding sequences.
        self.step_tokens = config.max_batch_tokens
        if config.tenant_slowdown:
            least = config.max_running_sequences + config.max_running_sequences // 2
            rest = int((1 - share) * config.max_batch_tokens)
            self.step_tokens = min(max(rest, least), config.max_batch_tokens)
        # The same of requests that use idle capacity only, also while they are alone: a new request waits for the step
        # under way.
        self.idle_sequences = max(1, int(config.idle_share * config.max_running_sequences))
        least = self.idle_sequences + self.idle_sequences // 2
        self.idle_step_tokens = min(
            max(int(config.idle_share * config.max_batch_tokens), least), config.max_batch_tokens
        )
        self._idle_queued_requests = max(1, int(config.idle_share * config.max_queued_requests))

    def queued_of(self, tenant: str) -> int:
        """Most waiting requests of a tenant, where tenants are told apart."""
        return self._idle_queued_requests if tenant == IDLE_TENANT else self.queued_requests
