"""Smallest engine: it runs sequences over a paged pool in the chunks and batches that a test asks for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from factories.engine.pools import spoil
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.attention.state_pool import new_states
from penstock.generation.layers.lora import AdapterWeights
from penstock.generation.models.decoder import CausalLM
from torch import Tensor


@dataclass
class PagedSequence:
    """Tokens, the number of them that are computed, and their blocks."""

    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    # Its adapter's matrices; None: the model as it is.
    adapter: AdapterWeights | None = None
    # One (vocab,) row per computed token.
    logits: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of tokens to compute."""
        return len(self.token_ids) - self.computed


class PagedDriver:
    """Engine that hands blocks out in random order and never frees them.

    A new pool is full of NaN, which shows reads of unwritten slots.
    """

    def __init__(
        self, model: CausalLM, *, num_blocks: int, block_size: int, seed: int = 0, kv_dtype: torch.dtype | None = None
    ) -> None:
        config = model.config
        self.model = model
        shape = KVShape.of(config, model.dtype, block_size)
        self.kv = replace(shape, dtype=kv_dtype or model.dtype).pool(num_blocks, model.device)
        spoil(self.kv)
        self.kv.states = new_states(model.state_layout, num_blocks, model.device)
        for tensor in () if self.kv.states is None else self.kv.states.in_place():
            tensor.fill_(float("nan"))
        self.random = random.Random(seed)
        self._free = list(range(num_blocks))
        self.random.shuffle(self._free)

    def take_blocks(self, count: int) -> list[int]:
        """Take blocks for a sequence, for a test that shares them."""
        return [self._free.pop() for _ in range(count)]

    def step(self, work: Sequence[tuple[PagedSequence, int]]) -> None:
        """Compute the next `count` tokens of each (sequence, count); appends their logits."""
        for sequence, count in work:
            while len(sequence.blocks) * self.kv.block_size < sequence.computed + count:
                sequence.blocks.append(self._free.pop())
        width = max(len(sequence.blocks) for sequence, _ in work)
        tables = torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _ in work], dtype=torch.int32)
        counts = [count for _, count in work]
        lengths = [sequence.computed + count for sequence, count in work]
        metadata, positions = AttentionMetadata.build(counts, lengths, tables, self.kv.block_size)
        if self.kv.states is not None:
            slots = self.kv.states.place((sequence.blocks[0], sequence.computed) for sequence, _ in work)
            metadata = replace(metadata, state_slots=slots)
        ids = [token for s, count in work for token in s.token_ids[s.computed : s.computed + count]]
        adapters = None
        if any(sequence.adapter is not None for sequence, _ in work):
            adapters = self.model.adapter_batch([sequence.adapter for sequence, _ in work], counts)
        hidden = self.model.forward(torch.tensor(ids), positions, metadata, self.kv, adapters=adapters)
        logits = self.model.compute_logits(hidden, adapters)
        for (sequence, count), rows in zip(work, logits.split(counts), strict=True):
            sequence.logits.extend(rows)
            sequence.computed += count

    def prefill(self, sequences: Sequence[PagedSequence], max_chunk: int) -> None:
        """Compute all tokens that are there, in random chunks of random mixes of the sequences."""
        while pending := [sequence for sequence in sequences if sequence.left]:
            chosen = self.random.sample(pending, self.random.randint(1, len(pending)))
            self.step([(s, self.random.randint(1, min(s.left, max_chunk))) for s in chosen])

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int, max_chunk: int) -> list[list[int]]:
        """Continue all prompts, with sequences still in their prompt beside others that decode."""
        sequences = [PagedSequence(list(prompt)) for prompt in prompts]
        wanted = [len(prompt) + new_tokens for prompt in prompts]
        while pending := [s for s, length in zip(sequences, wanted, strict=True) if len(s.token_ids) < length]:
            self.step([(s, min(s.left, self.random.randint(1, max_chunk))) for s in pending])
            for sequence in pending:
                if not sequence.left:
                    sequence.token_ids.append(int(sequence.logits[-1].argmax()))
        return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
