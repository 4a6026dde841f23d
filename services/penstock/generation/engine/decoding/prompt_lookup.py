"""Drafts from the text itself: the tokens after the first earlier occurrence of the last few tokens.

This is prompt lookup decoding (Saxena 2023) as in transformers 5.23's PromptLookupCandidateGenerator: the longest
n-gram first, and its first occurrence. transformers compares the whole context in every step; here an index grows with
the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.generation.engine.drafts import until_end

_NODE_BITS = 32


@dataclass(slots=True)
class NgramIndex:
    """Index of the first end of every n-gram in a growing list of tokens, for n up to `max_ngram_size`.

    It is a tree over the n-grams read backwards. A path grows only while it tells occurrences apart: text without
    repetitions takes one node per token for any size of n-grams. Adding a token costs one look-up per token of the
    longest n-gram that occurs again, at most `max_ngram_size`, for a text of any length.
    """

    max_ngram_size: int
    num_tokens: int = 0
    # (node, token before the node's n-gram) -> node; node 0 stands for the empty n-gram.
    _children: dict[int, int] = field(default_factory=dict)
    # Node -> end (exclusive) of the first occurrence of its n-gram.
    _ends: list[int] = field(default_factory=lambda: [0])
    # Node -> 1 when its first occurrence was extended one token back; that happens when a second one appears.
    _is_split: bytearray = field(default_factory=lambda: bytearray(b"\1"))
    # Earlier end of the longest n-gram at the end of the text that occurred before; 0: there is none.
    _match_end: int = 0

    def copy(self) -> NgramIndex:
        """Return an independent index for a text that continues differently."""
        return NgramIndex(
            self.max_ngram_size,
            self.num_tokens,
            self._children.copy(),
            self._ends.copy(),
            self._is_split.copy(),
            self._match_end,
        )

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the new tokens of `token_ids`, which is the whole text; tokens before them must not have changed."""
        for position in range(self.num_tokens, len(token_ids)):
            self._match_end = self._insert(token_ids, position)
        self.num_tokens = len(token_ids)

    def continuation(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens after the match, none without a match. `token_ids` are those of the last `extend`."""
        if not self._match_end:
            return []
        return list(token_ids[self._match_end : min(self._match_end + max_tokens, self.num_tokens)])

    def _insert(self, token_ids: Sequence[int], position: int) -> int:
        """Add the n-grams that end with `position`. Return the earlier end of the longest known one, or 0."""
        node, match_end = 0, 0
        for size in range(min(self.max_ngram_size, position + 1)):
            if not self._is_split[node]:
                self._split(token_ids, node, size)
            key = (node << _NODE_BITS) | token_ids[position - size]
            child = self._children.get(key)
            if child is None:
                self._add(key, position + 1)
                break
            node, match_end = child, self._ends[child]
        return match_end

    def _split(self, token_ids: Sequence[int], node: int, size: int) -> None:
        self._is_split[node] = 1
        before = self._ends[node] - 1 - size
        if before >= 0:
            self._add((node << _NODE_BITS) | token_ids[before], self._ends[node])

    def _add(self, key: int, end: int) -> None:
        self._children[key] = len(self._ends)
        self._ends.append(end)
        self._is_split.append(0)


def prompt_lookup(
    index: NgramIndex, token_ids: Sequence[int], max_tokens: int, end_token_ids: Collection[int]
) -> list[int]:
    """Return at most `max_tokens` drafts after `token_ids`, up to an end-of-sequence id and without it."""
    index.extend(token_ids)
    drafts = index.continuation(token_ids, max_tokens)
    return until_end(drafts, end_token_ids)
