"""Restriction to certain tokens: a fixed set, or the paths of a trie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

import numpy as np
import torch

from penstock.generation.core.decoding_mode import Rescue
from penstock.generation.sampling.ops.row_tokens import id_array, only
from penstock.generation.sampling.processors.base import Processor
from penstock.generation.sampling.trackers import Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.sampling_params import SamplingParams, TokenSequence
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState


class AllowedTokens(Processor):
    """`allowed_token_ids`: everything else is removed, at every position.

    If earlier processors left none of the allowed tokens, these get a score of 0 all the same, as in transformers'
    PrefixConstrainedLogitsProcessor: under beams only when no beam of the request can go on, and never in group beam
    search: 5.x does not have it, and 4.41.1 did not do so there.
    """

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows, self._states = rows, states
        self._ids = [torch.from_numpy(cast("npt.NDArray[np.int64]", s.prepared[AllowedTokens])) for s in states]
        self._ids = [ids_A.to(device) for ids_A in self._ids]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    @staticmethod
    def prepare(params: SamplingParams) -> npt.NDArray[np.int64]:
        return id_array(params.allowed_token_ids or ())

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        _keep_only(scores_NV, self._rows, self._states, self._ids)


class TrieNode:
    """A place in the trie of one request: paths with the same beginning. Children are made when an output comes here:
    a request may have tens of thousands of ids, and its outputs see few of them."""

    __slots__ = ("_allowed_A", "_children", "_depth", "_paths")

    def __init__(self, paths: Seq[TokenSequence], depth: int = 0) -> None:
        self._paths = paths
        self._depth = depth
        self._children: dict[int, TrieNode] | None = None
        self._allowed_A: torch.Tensor | None = None

    @property
    def is_end(self) -> bool:
        """True when some path ends here."""
        return any(len(path) == self._depth for path in self._paths)

    @property
    def children(self) -> dict[int, TrieNode]:
        """The next places, by the token that leads to each."""
        if self._children is None:
            begun: dict[int, list[TokenSequence]] = {}
            for path in self._paths:
                if len(path) > self._depth:
                    begun.setdefault(path[self._depth], []).append(path)
            self._children = {token_id: TrieNode(paths, self._depth + 1) for token_id, paths in begun.items()}
        return self._children

    def allowed(self, eos_A: torch.Tensor) -> torch.Tensor:
        """Tokens that may follow: the next ones of the paths, and the end-of-sequence ids where a path ends."""
        if self._allowed_A is None:
            ends = eos_A.tolist() if self.is_end or not self.children else []
            self._allowed_A = torch.from_numpy(id_array([*self.children, *ends])).to(eos_A.device)
        return self._allowed_A


class TrieCursor(Tracker):
    """The output's place in the trie; None after the output left the trie."""

    __slots__ = ("_first", "_root", "node")

    def __init__(self, root: TrieNode, num_prompt_tokens: int) -> None:
        self._root = root
        self._first = num_prompt_tokens
        self.node: TrieNode | None = root

    def follow(self, token_ids: Seq[int], start: int) -> None:
        if start == 0:
            self.node = self._root
        for token_id in token_ids[max(start, self._first) :]:
            self.node = None if self.node is None else self.node.children.get(token_id)

    def copy(self) -> Self:
        twin = type(self)(self._root, self._first)
        twin.node = self.node
        return twin


class AllowedTrie(Processor):
    """`allowed_token_trie`, the declarative form of transformers' prefix_allowed_tokens_fn: every output is a path from
    the root, and the end of the sequence follows a whole path. Tokens are forced as in `AllowedTokens`."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows, self._states = rows, states
        self._cursors = [cast("TrieCursor", state.trackers[AllowedTrie]) for state in states]
        self._eos = [torch.from_numpy(id_array(s.sequence.params.eos_token_ids)).to(device) for s in states]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.allowed_token_trie is not None

    @staticmethod
    def prepare(params: SamplingParams) -> TrieNode:
        return TrieNode(params.allowed_token_trie or ())

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> TrieCursor:
        return TrieCursor(cast("TrieNode", prepared), sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        allowed = [
            eos_A if cursor.node is None else cursor.node.allowed(eos_A)
            for cursor, eos_A in zip(self._cursors, self._eos, strict=True)
        ]
        _keep_only(scores_NV, self._rows, self._states, allowed)


def _keep_only(scores_NV: torch.Tensor, rows: Seq[int], states: Seq[RowState], allowed: Seq[torch.Tensor]) -> None:
    alive: set[int] = set()
    dead: list[tuple[int, torch.Tensor, RowState]] = []
    for row, ids_A, state in zip(rows, allowed, states, strict=True):
        # The ids are ascending and seldom beyond the vocabulary; there are many, and each row reads them once.
        kept_A = ids_A if len(ids_A) and ids_A[-1] < scores_NV.shape[1] else ids_A[ids_A < scores_NV.shape[1]]
        only(scores_NV[row], kept_A)
        if float(scores_NV[row].amax()) == -torch.inf:
            dead.append((row, kept_A, state))
        else:
            alive.add(id(state.sequence.params))
    for row, kept_A, state in dead:
        # All sequences of a request hold the same options.
        params = state.sequence.params
        rescue = params.mode.rescue
        if rescue is Rescue.EACH or (rescue is Rescue.TOGETHER and id(params) not in alive):
            scores_NV[row, kept_A] = 0.0
