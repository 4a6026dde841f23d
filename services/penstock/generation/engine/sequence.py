"""One token sequence and its blocks. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.sampling.params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one (possibly forked) sequence.

    There is no prefill and no decode phase: `num_computed_tokens` of `token_ids` have their KV in the pool, the
    scheduler hands out the rest under its budget, and a token is sampled when none is left.
    """

    # Unique in the process, never reused.
    seq_id: int
    # Which returned sequence.
    index: int
    params: SamplingParams
    # derive_seed(params.seed, index)
    seed: int
    # Prompt, then output.
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    # Ids of blocks in the pool; block i holds tokens [i * block_size, (i + 1) * block_size).
    block_table: list[int] = field(default_factory=list)
    # Chained hashes of its leading full blocks, as far as anyone asked; kept when the blocks are given back.
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far: the position that the next draw is counted by."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]
