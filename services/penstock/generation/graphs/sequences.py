"""Named sequences: the scheduler does not know their part of the KV pool. Engine's thread only.

So no request waits for such a block, and none is preempted or refused for one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted


@dataclass(slots=True, eq=False)
class PoolSequence:
    """Keys and values under a name, of a lease or a stream."""

    # Tokens that each layer has.
    num_tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    # True: it is released, and another sequence may have its blocks.
    is_gone: bool = False


class SequenceBlocks:
    """The blocks of named sequences."""

    def __init__(self, first_block: int, num_blocks: int, block_size: int, max_tokens: int) -> None:
        """Own `num_blocks` blocks from `first_block` on. A sequence has at most `max_tokens`."""
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._free = list(range(first_block + num_blocks - 1, first_block - 1, -1))

    @property
    def num_used(self) -> int:
        """Number of blocks that sequences hold. Readable from any thread."""
        return self.num_blocks - len(self._free)

    def grow(self, sequence: PoolSequence, num_tokens: int) -> None:
        """Give a sequence room for `num_tokens` in total.

        Raises NotFound for one that is gone, InvalidArgument past the model's context, ResourceExhausted GRAPH_QUOTA.
        """
        if sequence.is_gone:
            raise NotFound("sequence: it has ended", reason="SEQUENCE_NOT_FOUND", field="sequence")
        if num_tokens > self._max_tokens:
            raise InvalidArgument("sequence", f"must be at most {self._max_tokens} tokens long")
        lacking = -(-num_tokens // self._block_size) - len(sequence.blocks)
        if lacking > len(self._free):
            raise ResourceExhausted(
                f"named sequences have {self.num_blocks * self._block_size} tokens of the KV pool, "
                "and other ones hold too many of them: end some, or raise --graph-kv-tokens",
                reason="GRAPH_QUOTA",
            )
        for _ in range(lacking):
            sequence.blocks.append(self._free.pop())

    def release(self, sequence: PoolSequence) -> None:
        """Free the blocks. A sequence that is gone is fine."""
        sequence.is_gone = True
        self._free.extend(reversed(sequence.blocks))
        sequence.blocks.clear()
