"""One token sequence and its blocks. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawSpec
from penstock.generation.core.grammar import GrammarError

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.sampling_params import SamplingParams


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
    # What the sampler does with its row; its strategy changes it between steps.
    draw: DrawSpec = field(default_factory=DrawSpec)
    # Where its output stands in the request's grammar.
    grammar: GrammarState | None = None
    # Sequences of one family begin with the same prompt and share its blocks.
    family: int = 0
    # Classifier-free guidance: the unconditional branch, whose logits guide this sequence's draw.
    guide: Sequence | None = None
    # Trailing tokens of token_ids that are only drafted. They are computed, and `probes` tell what is drawn after each;
    # a sequence with drafts draws nothing itself.
    num_draft_tokens: int = 0
    # (i, probe): the probe draws from the row of token i. A probe holds token_ids[: i + 1], has no blocks, is never
    # scheduled, and lives for one step.
    probes: list[tuple[int, Sequence]] = field(default_factory=list)
    # Of a probe: whose rows it draws from.
    origin: Sequence | None = None
    # Rows from this one on tell log-probabilities of the prompt's next tokens; None: nobody asked, or all are known.
    first_logprob_row: int | None = None
    # Scoring: the token after the last, whose log-probability is wanted though it is never computed itself.
    next_token_id: int | None = None
    # Leading blocks that were offered to the prefix cache.
    num_cached_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, drafts included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far: the position that the next draw is counted by."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """One more output token, which also advances the grammar.

        Raises GrammarError when the grammar does not allow it, and what GrammarState.advance raises.
        """
        self.token_ids.append(token_id)
        if self.grammar is not None and not self.grammar.advance(token_id):
            raise GrammarError("a token was drawn that the grammar does not allow")

    def append_drafts(self, drafts: list[int], probes: list[tuple[int, Sequence]]) -> None:
        """Let `drafts` follow for verification by `probes`; see the fields."""
        self.token_ids.extend(drafts)
        self.num_draft_tokens = len(drafts)
        self.probes = probes

    def take_back_drafts(self) -> list[int]:
        """The drafts, which are no tokens any more; the probes are forgotten.

        What was computed of them still counts, for a caller who appends those that are right and then rolls back.
        """
        first = len(self.token_ids) - self.num_draft_tokens
        drafts = self.token_ids[first:]
        del self.token_ids[first:]
        self.num_draft_tokens = 0
        self.probes = []
        return drafts

    def roll_back(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens: what drafting appended and verification refused is gone.

        The grammar is the strategy's to keep: drafts never advance it.
        """
        del self.token_ids[num_tokens:]
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_draft_tokens = 0
        self.probes = []
