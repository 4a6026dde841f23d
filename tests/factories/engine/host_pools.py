"""Host pools for tests: sizes and ways of preemption, and a judge that swaps at random."""

from __future__ import annotations

from random import Random
from typing import Any

from penstock.generation.engine.config import AUTO, RECOMPUTE, SWAP, EngineConfig
from penstock.generation.engine.group import SequenceGroup
from penstock.generation.engine.swap_or_recompute import SwapPolicy
from typing_extensions import override

# (blocks, way, whether evicted prefixes are kept): none, too small for a group, and roomy ones.
HOSTS: tuple[tuple[int, str, bool], ...] = (
    (0, AUTO, True),
    (3, SWAP, True),
    (12, AUTO, True),
    (60, SWAP, False),
    (400, SWAP, True),
    (400, AUTO, True),
    (400, RECOMPUTE, True),
)


def host_fields(blocks: int, way: str, keeps_prefixes: bool = True) -> dict[str, Any]:
    """Fields of EngineConfig."""
    return {"num_host_blocks": blocks, "preemption": way, "host_prefix_cache": keeps_prefixes}


class AnyPolicy(SwapPolicy):
    """Judge for whom swapping is the cheaper way now and then: what it costs depends on time, and must change no id."""

    def __init__(self, config: EngineConfig, draw: Random) -> None:
        super().__init__(config.preemption, config.block_bytes)
        self._draw = draw

    @override
    def swaps(self, group: SequenceGroup, blocks: int, tokens: int) -> bool:
        assert blocks >= 0
        assert tokens > 0
        return self._draw.random() < 0.5 if self._way == AUTO else super().swaps(group, blocks, tokens)
