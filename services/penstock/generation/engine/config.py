"""Every bound and default of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option, options_of
from penstock.generation.core.cache_group import CacheGroup

# Ways of a preemption: see swap_or_recompute.py.
SWAP, RECOMPUTE, AUTO = "swap", "recompute", "auto"
PREEMPTIONS = (AUTO, SWAP, RECOMPUTE)
# Groups of options, which the service's configuration has more of.
MEMORY, BATCHING, PROGRESS, INSIDE = "KV memory", "Batching", "Progress", "See inside"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Knobs of the engine. Each is declared here alone: the service's configuration inherits it, with flag and page."""

    preemption: str = option(
        AUTO,
        "Way to preempt a request: swap copies its blocks to the host pool and back, recompute computes them again, "
        "auto chooses the cheaper one by measurement. Without a host pool: recompute.",
        group=MEMORY,
    )
    host_prefix_cache: bool = option(
        True, "Keep prefixes in the host pool when the KV pool has no room for them.", group=MEMORY
    )
    kv_disk_queue: int = option(
        256,
        "Most blocks that wait to be written to --kv-disk, and at most half of the host pool; it gets no further ones.",
        group=MEMORY,
        minimum=1,
    )
    kv_disk_stop_seconds: float = option(
        5.0,
        "Time to write what the pools keep to --kv-disk when the process stops; what was used last goes first.",
        group=MEMORY,
        minimum=0.0,
    )
    max_block_copies: int = option(1024, "Most blocks of one CopyBlocks or SwapBlocks.", group=MEMORY, minimum=1)
    prefix_cache: bool = option(True, "Share the blocks of equal prompt prefixes.", group=MEMORY)
    state_snapshot_tokens: int = option(
        256,
        "Fewest tokens between two snapshots of a state. Each snapshot costs its prompt a further pass, and recurrent "
        "layers take as long for a few tokens as for some hundred.",
        group=MEMORY,
        minimum=0,
    )
    max_running_sequences: int = option(64, "Sequences computed in one engine step.", group=BATCHING, minimum=1)
    # Drafts fill a step up to this number, so they become fewer with more sequences: rows are nearly free only while
    # they are few.
    max_draft_rows: int = option(
        32,
        "Most decoding sequences plus draft tokens in an engine step that verifies drafts; 0: no drafts are verified.",
        group=BATCHING,
        minimum=0,
    )
    ngram_memory_tokens: int = option(
        65_536,
        "Output tokens remembered per tenant for ngram_memory_num_tokens, 20 to 28 bytes each; the oldest are dropped.",
        group=BATCHING,
        minimum=256,
    )
    ngram_memory_tenants: int = option(
        64,
        "Tenants with remembered outputs; the least recently used are dropped. 0: nothing is remembered.",
        group=BATCHING,
        minimum=0,
    )
    ngram_memory_seconds: float = option(
        3600.0,
        "Time that a tenant's outputs stay remembered after its last request with ngram_memory_num_tokens.",
        group=BATCHING,
        minimum=0.0,
    )
    max_queued_requests: int = option(
        1024, "Requests waiting to be scheduled; more are refused.", group=BATCHING, minimum=1
    )
    deadline_headroom: float = option(
        1.2,
        "A request is refused when its forecast time, multiplied by this, exceeds the time to its deadline.",
        group=BATCHING,
        minimum=0.01,
    )
    wait_headroom: float = option(
        2.0,
        "Further factor on the forecast of a request that has to wait for a quarter of its time or longer, and a part "
        "of it for a shorter wait: other programs may slow the machine down in that time. It grows, up to 4, after "
        "requests have taken longer than it allows.",
        group=BATCHING,
        minimum=1.0,
    )
    tenant_share: float = option(
        0.75,
        "Share of --max-queued-requests that one tenant may have, and of --max-running-sequences while there are "
        "others. Then steps have at most the rest of --max-batch-tokens: a new tenant's first step is near.",
        group=BATCHING,
        minimum=0.01,
        maximum=1.0,
    )
    tenant_slowdown: float = option(
        1.5,
        "While one tenant has a crowd of running sequences, steps of other tenants take at most this many times as "
        "long on average: the crowd rests in the steps between. Above 1; 0: it never rests.",
        group=BATCHING,
        minimum=0.0,
    )
    tenant_memory_seconds: float = option(
        10.0, "Time that a tenant still counts as present after its last request.", group=BATCHING, minimum=0.0
    )
    idle_share: float = option(
        0.25,
        "Share of --max-running-sequences, --max-batch-tokens and --max-queued-requests that requests of idle capacity "
        "may have. They rest while there are others; a new request waits for their step under way. For "
        "--tenant-memory-seconds after others, their steps have this share of the time, too.",
        group=BATCHING,
        minimum=0.01,
        maximum=1.0,
    )
    heartbeat_seconds: float = option(
        0.25,
        "Interval of the progress messages to a waiting session; keep it well below the router's "
        "--stall-timeout-seconds.",
        group=PROGRESS,
        minimum=0.01,
    )
    overdue_step_factor: float = option(
        2.0,
        "An engine step is overdue after this many times the usual time of its size; sessions then get no progress "
        "messages.",
        group=PROGRESS,
        minimum=1,
    )
    hung_step_seconds: float = option(
        10.0,
        "A step hangs when it takes longer than this and than --hung-step-factor allows; health is then NOT_SERVING "
        "until it ends.",
        group=PROGRESS,
        minimum=0.1,
    )
    hung_step_factor: float = option(
        10.0,
        "A step hangs only when it also takes this many times the usual time of its size.",
        group=PROGRESS,
        minimum=1,
    )
    max_pause_seconds: float = option(
        600.0,
        "Longest pause (the call Pause): after it the engine steps again, although nobody has resumed it.",
        group=PROGRESS,
        minimum=0.1,
    )
    dump_groups: int = option(
        64, "Requests of each queue that a dump of the engine's state lists one by one.", group=INSIDE, minimum=0
    )
    dump_sequences: int = option(8, "Sequences of each request that it lists one by one.", group=INSIDE, minimum=0)
    dump_wait_seconds: float = option(
        2.0,
        "Time that the engine has to dump its state between two steps; after that the state is read from outside.",
        group=INSIDE,
        minimum=0,
    )


@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """Configuration of one engine: its knobs, and what the start of its model has found and measured.

    Sizes in tokens or blocks, times in seconds. Raises ValueError naming the field that is wrong.
    """

    num_blocks: int
    block_size: int
    # Prompt and output of one sequence together.
    max_context_tokens: int
    # Rows of one forward pass. At least max_running_sequences, so that every decoding sequence moves each step.
    max_batch_tokens: int = 512
    # Layers keep a state after a sequence's last computed token, and no block has it. So there is no host pool, and a
    # prefix is shared only where one of the snapshots has the state after it.
    keeps_states: bool = False
    num_state_snapshots: int = 0
    # Groups of layers, the one that reads all positions first. Blocks behind what a group's rows read are given back
    # while a sequence goes on. None given: there is one group, of `window`.
    groups: tuple[CacheGroup, ...] = ()
    # Positions up to its own that a row reads at most, in every layer; 0: some layer reads all.
    window: int = 0
    # Blocks of the host pool; 0: there is none.
    num_host_blocks: int = 0
    # Bytes of one block; 0: not known.
    block_bytes: int = 0
    # Time that a refused caller is told to wait.
    queue_full_retry_seconds: float = 1.0
    # Share of the pool that admission leaves free for running sequences to grow into.
    reserve_share: float = 0.01
    # Share of a step's prefill budget that a prompt too long for it gets while other prompts wait.
    long_prompt_share: float = 0.75
    # Waiting time that one level of priority outweighs, so that no level can starve another for ever.
    priority_seconds: float = 30.0
    # Largest priority, and smallest when negated: without a bound one request could outrun years of waiting.
    max_priority: int = 100

    def __post_init__(self) -> None:
        for bound in options_of(type(self)):
            try:
                bound.check(getattr(self, bound.name))
            except ValueError as error:
                raise ValueError(f"{bound.name} {error}") from None
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("num_state_snapshots", "window", "num_host_blocks", "block_bytes", "max_priority"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.max_context_tokens < 2:
            raise ValueError("max_context_tokens must hold a prompt token and a new one")
        if self.max_batch_tokens < self.max_running_sequences:
            raise ValueError("max_batch_tokens must be at least max_running_sequences")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}")
        if self.preemption == SWAP and not self.num_host_blocks:
            raise ValueError("preemption swap needs num_host_blocks")
        if self.keeps_states and self.num_host_blocks:
            raise ValueError("keeps_states allows no num_host_blocks")
        if self.keeps_states and self.prefix_cache and not self.num_state_snapshots:
            raise ValueError("keeps_states with prefix_cache needs num_state_snapshots")
        if self.keeps_states and (self.window or self.groups):
            raise ValueError("keeps_states allows no window and no groups")
        if self.groups and self.window:
            raise ValueError("groups have windows of their own")
        if any(not group.span for group in self.groups[1:]):
            raise ValueError("only the first of the groups may read all positions")
        if self.tenant_slowdown and self.tenant_slowdown <= 1.0:
            raise ValueError("tenant_slowdown must be 0 or above 1")
        if not 0.0 <= self.reserve_share < 1.0:
            raise ValueError("reserve_share must be in [0, 1)")
        if not 0.0 < self.long_prompt_share <= 1.0:
            raise ValueError("long_prompt_share must be in (0, 1]")
        if self.priority_seconds <= 0.0:
            raise ValueError("priority_seconds must be above 0")

    @property
    def reserve_blocks(self) -> int:
        """Number of blocks that admission leaves free."""
        return int(self.reserve_share * self.num_blocks)

    @property
    def block_groups(self) -> tuple[CacheGroup, ...]:
        """Groups of layers, at least one."""
        return self.groups or (CacheGroup(window=self.window),)

    @property
    def bundle_blocks(self) -> int:
        """Blocks in which all groups keep a block of tokens."""
        return sum(group.num_blocks for group in self.block_groups)

    def blocks_needed(self, prompt_tokens: int, output_tokens: int, num_sequences: int) -> int:
        """Most blocks that a request can ever hold: full prompt blocks once, the rest per sequence.

        The last token of a sequence is never computed, so it needs no room.
        """
        shared = prompt_tokens // self.block_size
        own = -(-(prompt_tokens + output_tokens - 1) // self.block_size) - shared
        whole = shared + num_sequences * own
        needed = 0
        for group in self.block_groups:
            most = num_sequences * group.most_blocks(self.max_batch_tokens, self.block_size) if group.span else whole
            needed += group.num_blocks * min(whole, most)
        return needed
