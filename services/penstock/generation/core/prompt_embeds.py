"""Embeddings in place of a prompt's ids. Plain data: no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

# Stands among a sequence's ids for a token that came as an embedding only. No vocabulary is that large, so it equals no
# id of an option or of a draw, and its repetitions do not count as any.
PLACEHOLDER = (1 << 32) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """Embeddings of the first `num_tokens` tokens of a prompt (transformers' inputs_embeds), for all its sequences."""

    # (num_tokens, hidden size), row-major, in the model's dtype.
    data: bytearray = field(repr=False)
    num_tokens: int
    # Number of leading tokens with the id PLACEHOLDER.
    num_placeholders: int
    # SHA-256 of each KV block's rows; the last block may have rows for only a part of its tokens.
    digests: tuple[bytes, ...]

    def block_content(self, index: int, later_ids: Seq[int]) -> bytes:
        """Return the content of block `index`, which begins with embeddings; `later_ids` are its tokens after them.

        A block of ids alone is 4 bytes a token, and this is one byte more than a multiple of 4: no two are equal.
        """
        return b"\0" + self.digests[index] + array("I", later_ids).tobytes()
