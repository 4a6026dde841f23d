"""Every bound and default of the engine."""

from __future__ import annotations

from dataclasses import dataclass

# Ways of a preemption: see swap_or_recompute.py.
SWAP, RECOMPUTE, AUTO = "swap", "recompute", "auto"
PREEMPTIONS = (AUTO, SWAP, RECOMPUTE)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in tokens or blocks, times in seconds. Raises ValueError naming the field that is wrong.

    Not slotted, so that a service's own config can name these defaults: `EngineConfig.max_batch_tokens`.
    """

    num_blocks: int
    block_size: int
    # Prompt and output of one sequence together.
    max_context_tokens: int
    # Rows of one forward pass. At least max_running_sequences, so that every decoding sequence moves each step.
    max_batch_tokens: int = 512
    max_running_sequences: int = 64
    # Assisted generation: most drawing rows and draft rows of one step together. Drafts fill a step up to this number,
    # so they become fewer with more sequences: rows are nearly free only while they are few.
    max_draft_rows: int = 32
    # Drafts from memory: output tokens that are kept of a tenant, tenants, and how long after the last use of one.
    ngram_memory_tokens: int = 65_536
    ngram_memory_tenants: int = 64
    ngram_memory_seconds: float = 3600.0
    # Requests that are accepted and not running yet. Over it: RESOURCE_EXHAUSTED.
    max_queued_requests: int = 1024
    # Time that a refused caller is told to wait.
    queue_full_retry_seconds: float = 1.0
    # Forecasts of a request's time are multiplied by this before they are held against its deadline.
    deadline_headroom: float = 1.2
    # And by this, at least, where it has to wait: the machine may become half as fast meanwhile.
    wait_headroom: float = 2.0
    # Share of the running sequences, and of the queue, that one tenant may have while there are others.
    tenant_share: float = 0.75
    # Beside one tenant's crowd of running sequences, steps of the others take on average at most this many times as
    # long as without it; the crowd rests in the steps between. Above 1; 0: it never rests.
    tenant_slowdown: float = 1.5
    # Time for which a tenant that has no request counts as being there.
    tenant_memory_seconds: float = 10.0
    # Share of the pool that admission leaves free for running sequences to grow into.
    reserve_share: float = 0.01
    # Share of a step's prefill budget that a prompt too long for it gets while other prompts wait.
    long_prompt_share: float = 0.75
    # Waiting time that one level of priority outweighs, so that no level can starve another for ever.
    priority_seconds: float = 30.0
    # Largest priority, and smallest when negated: without a bound one request could outrun years of waiting.
    max_priority: int = 100
    prefix_cache: bool = True
    # Layers keep a state after a sequence's last computed token: it cannot go back to an earlier one, and no block has
    # it. So there is no host pool, and a prefix is shared only where one of the snapshots has the state after it.
    keeps_states: bool = False
    num_state_snapshots: int = 0
    # Least number of tokens from one to the next of a sequence.
    min_snapshot_tokens: int = 0
    # Positions up to its own that a row reads at most, in every layer; 0: some layer reads all. Blocks that are behind
    # it are given back while a sequence goes on.
    window: int = 0
    # Blocks of the host pool; 0: there is none.
    num_host_blocks: int = 0
    # Bytes of one block; 0: not known.
    block_bytes: int = 0
    # Way of a preemption where there is a host pool: one of PREEMPTIONS.
    preemption: str = AUTO
    # The host pool keeps prefixes that the pool evicts.
    host_prefix_cache: bool = True
    # Most blocks of one call that copies blocks.
    max_block_copies: int = 1024
    # `Engine.dump`: most requests of each queue, and sequences of each request, that are listed one by one.
    dump_groups: int = 64
    dump_sequences: int = 8
    # Time within which the engine's thread must reach a dump between two steps.
    dump_wait_seconds: float = 2.0
    # How often a caller that waits is told that the engine makes progress.
    heartbeat_seconds: float = 0.25
    # A step is overdue, and no sign of progress, past this many times what steps of its size take.
    overdue_step_factor: float = 2.0
    # A step hangs when it takes longer than both: this time, and this many times what steps of its size take.
    hung_step_seconds: float = 10.0
    hung_step_factor: float = 10.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_running_sequences", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_context_tokens < 2:
            raise ValueError("max_context_tokens must hold a prompt token and a new one")
        if self.max_batch_tokens < self.max_running_sequences:
            raise ValueError("max_batch_tokens must be at least max_running_sequences")
        if self.ngram_memory_tokens < 256:
            raise ValueError("ngram_memory_tokens must be at least 256")
        for name in (
            "max_draft_rows",
            "num_host_blocks",
            "num_state_snapshots",
            "min_snapshot_tokens",
            "window",
            "block_bytes",
            "max_block_copies",
            "ngram_memory_tenants",
            "ngram_memory_seconds",
            "dump_groups",
            "dump_sequences",
            "dump_wait_seconds",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}")
        if self.preemption == SWAP and not self.num_host_blocks:
            raise ValueError("preemption swap needs num_host_blocks")
        if self.keeps_states and self.num_host_blocks:
            raise ValueError("keeps_states allows no num_host_blocks")
        if self.keeps_states and self.prefix_cache and not self.num_state_snapshots:
            raise ValueError("keeps_states with prefix_cache needs num_state_snapshots")
        if self.keeps_states and self.window:
            raise ValueError("keeps_states allows no window")
        if self.deadline_headroom <= 0.0:
            raise ValueError("deadline_headroom must be above 0")
        if self.wait_headroom < 1.0:
            raise ValueError("wait_headroom must be at least 1")
        if not 0.0 < self.tenant_share <= 1.0:
            raise ValueError("tenant_share must be in (0, 1]")
        if self.tenant_slowdown and self.tenant_slowdown <= 1.0:
            raise ValueError("tenant_slowdown must be 0 or above 1")
        if self.tenant_memory_seconds < 0.0:
            raise ValueError("tenant_memory_seconds must not be negative")
        for name in ("heartbeat_seconds", "hung_step_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("overdue_step_factor", "hung_step_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0.0 <= self.reserve_share < 1.0:
            raise ValueError("reserve_share must be in [0, 1)")
        if not 0.0 < self.long_prompt_share <= 1.0:
            raise ValueError("long_prompt_share must be in (0, 1]")
        if self.priority_seconds <= 0.0:
            raise ValueError("priority_seconds must be above 0")
        if self.max_priority < 0:
            raise ValueError("max_priority must not be negative")

    @property
    def reserve_blocks(self) -> int:
        """Number of blocks that admission leaves free."""
        return int(self.reserve_share * self.num_blocks)

    @property
    def shared_batch_tokens(self) -> int:
        """Rows of a step while several tenants are there, unless a crowd rests in it.

        Prompts must progress beside all decoding sequences.
        """
        if not self.tenant_slowdown:
            return self.max_batch_tokens
        least = self.max_running_sequences + self.max_running_sequences // 2
        return min(max(int((1 - self.tenant_share) * self.max_batch_tokens), least), self.max_batch_tokens)

    @property
    def max_queued_of_tenant(self) -> int:
        """Most requests of one tenant that wait, where tenants are told apart."""
        return max(1, int(self.tenant_share * self.max_queued_requests))

    @property
    def blocks_of_window(self) -> int:
        """Most blocks that a sequence holds where there is a window: it, and the rows of one step.

        One position more than the window stays, for a fork that goes back by a token.
        """
        return -(-(self.window + self.max_batch_tokens - 1) // self.block_size) + 1

    def blocks_needed(self, prompt_tokens: int, output_tokens: int, num_sequences: int) -> int:
        """Most blocks that a request can ever hold: full prompt blocks once, the rest per sequence.

        The last token of a sequence is never computed, so it needs no room.
        """
        shared = prompt_tokens // self.block_size
        own = -(-(prompt_tokens + output_tokens - 1) // self.block_size) - shared
        needed = shared + num_sequences * own
        return min(needed, num_sequences * self.blocks_of_window) if self.window else needed
