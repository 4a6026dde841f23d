"""One token sequence and its blocks. Plain data: no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawSpec
from penstock.generation.core.grammar import GrammarError

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.prompt_embeds import PromptEmbeds
    from penstock.generation.core.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence in one group of layers; entry i holds tokens [i * block_size, (i + 1) * block_size)."""

    # Each names its bundle of blocks by the first of them.
    blocks: list[int]
    # Blocks of a bundle.
    width: int = 1
    # Number of leading entries behind the group's window: they are freed, and what stands there is meaningless.
    num_released: int = 0

    @property
    def held(self) -> list[int]:
        """Entries that are held: the table itself, or a copy of a part of it."""
        return self.blocks[self.num_released :] if self.num_released else self.blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one (possibly forked) sequence.

    There is no prefill phase and no decode phase. The first `num_computed_tokens` of `token_ids` have their KV in the
    pool, the scheduler hands out the rest under its budget, and a token is drawn when none is left to compute.
    """

    # Unique in the process, never reused.
    seq_id: int
    # Number of the returned sequence that it becomes.
    index: int
    params: SamplingParams
    # derive_seed(params.seed, index)
    seed: int
    # Prompt, then output.
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    # Ids of its blocks in the first group of layers: the list of the first of `tables`.
    block_table: list[int] = field(default_factory=list)
    # Its blocks in every group of layers, once it has had some.
    tables: tuple[BlockTable, ...] = ()
    # Chained hashes of its leading full blocks, made on demand; kept when the blocks are freed.
    block_hashes: list[bytes] = field(default_factory=list)
    # Use of its last row; its strategy changes it between steps.
    draw: DrawSpec = field(default_factory=DrawSpec)
    # Position of its output in the request's grammar.
    grammar: GrammarState | None = None
    # Sequences of one family begin with the same prompt and share its blocks.
    family: int = 0
    # Classifier-free guidance: the unconditional branch. Its logits guide this sequence's draw. None: no guidance.
    unconditional: Sequence | None = None
    # Number of trailing tokens of token_ids that are only drafts. They are computed, and `verifiers` draw after each; a
    # sequence with drafts draws nothing itself.
    num_draft_tokens: int = 0
    # (i, verifier): the verifier draws from the row of token i. It holds token_ids[: i + 1], has no blocks, is never
    # scheduled, and lives for one step.
    verifiers: list[tuple[int, Sequence]] = field(default_factory=list)
    # Sequence that this verifier draws from, by its rows; None: this is not a verifier.
    origin: Sequence | None = None
    # First row that gives a log-probability of the prompt's next token; None: none is wanted, or all are known.
    first_logprob_row: int | None = None
    # Scoring: the token after the last one. Its log-probability is wanted, but it is never computed itself.
    next_token_id: int | None = None
    # A draft head reads the hidden states of its rows; its strategy changes it between steps.
    is_tapped: bool = False
    # Number of leading blocks that were offered to the prefix cache.
    num_cached_blocks: int = 0
    # Embeddings of the first tokens of its prompt; None: the model looks up those of all ids.
    embeds: PromptEmbeds | None = None

    @property
    def held_blocks(self) -> list[int]:
        """Blocks that it holds in all groups, each bundle by its first: a table itself, or a copy."""
        if len(self.tables) == 1:
            return self.tables[0].held
        return [block for table in self.tables for block in table.held]

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks that it holds in all groups."""
        return sum([table.width * (len(table.blocks) - table.num_released) for table in self.tables])

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far, drafts included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, which is the position of the next draw."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Copy of the output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_constrained(self) -> bool:
        """True where its grammar does not allow every token next."""
        return self.grammar is not None and not self.grammar.is_free

    @property
    def num_placeholders(self) -> int:
        """Number of leading tokens without an id: options that read ids begin after them."""
        return 0 if self.embeds is None else self.embeds.num_placeholders

    @property
    def num_prompt_ids(self) -> int:
        """Number of prompt tokens with an id."""
        return self.num_prompt_tokens - self.num_placeholders

    @property
    def known_token_ids(self) -> list[int]:
        """Ids of all tokens that have one: the sequence's own list, or a copy of a part of it."""
        return self.token_ids[self.embeds.num_placeholders :] if self.embeds is not None else self.token_ids

    def block_content(self, index: int, block_size: int) -> bytes:
        """Return the content that determines the keys and values of full block `index`, together with the blocks
        before it."""
        first, end = index * block_size, (index + 1) * block_size
        embeds = self.embeds
        if embeds is not None and first < embeds.num_tokens:
            return embeds.block_content(index, self.token_ids[embeds.num_tokens : end])
        return array("I", self.token_ids[first:end]).tobytes()

    def append(self, token_id: int) -> None:
        """Append an output token and advance the grammar.

        Raises GrammarError when the grammar does not allow it, and the errors of GrammarState.advance.
        """
        self.token_ids.append(token_id)
        if self.grammar is not None and not self.grammar.advance(token_id):
            raise GrammarError("the grammar does not allow the drawn token")

    def append_drafts(self, drafts: list[int], verifiers: list[tuple[int, Sequence]]) -> None:
        """Append `drafts`, which `verifiers` verify; see the fields."""
        self.token_ids.extend(drafts)
        self.num_draft_tokens = len(drafts)
        self.verifiers = verifiers

    def take_back_drafts(self) -> list[int]:
        """Remove the drafts and their verifiers, and return the drafts.

        `num_computed_tokens` stays, for a caller that appends the accepted drafts again and then rolls back.
        """
        first = len(self.token_ids) - self.num_draft_tokens
        drafts = self.token_ids[first:]
        del self.token_ids[first:]
        self.num_draft_tokens = 0
        self.verifiers = []
        return drafts

    def roll_back(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens: rejected drafts are dropped.

        The grammar stays as it is: drafts never advance it.
        """
        del self.token_ids[num_tokens:]
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_draft_tokens = 0
        self.verifiers = []
