"""Places of a model's layers in the blocks of the pool: layers that read the same positions share blocks.

The pool's blocks have one size, and a block holds the keys and values of `layers_a_block` layers. A group of layers has
as many blocks of the same tokens as it needs for all of them: a bundle (`CacheGroup.num_blocks`). So any free block
serves any group, and the memory is never divided between groups. The last block of a group may have places that no
layer uses, at most _MOST_SPARE of the group's layers; with fewer layers a block there are none, but more tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.generation.core.cache_group import CacheGroup

# Largest share of a group's layers that may be lost to places without a layer.
_MOST_SPARE = 0.035


@dataclass(frozen=True, slots=True)
class LayerSight:
    """Positions that a layer's rows read: up to `window`, or those of a chunk of `chunk`; 0 and 0: all. `align`: see
    CacheGroup."""

    window: int = 0
    chunk: int = 0
    align: int = 1


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups of layers, the one that reads everything first, and the place of each layer."""

    groups: tuple[CacheGroup, ...]
    layers_a_block: int
    # Of each layer: the number of its block among those of all bundles of the same tokens, and its place in it.
    places: tuple[tuple[int, int], ...]
    # Numbers of each group's layers.
    members: tuple[tuple[int, ...], ...]

    @property
    def bundle_blocks(self) -> int:
        """Blocks in which all layers keep a block of tokens."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """True when one block holds all layers."""
        return self.bundle_blocks == 1

    def most_blocks(self, num_tokens: int, rows: int, block_size: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds, in steps of up to `rows` rows."""
        length = -(-num_tokens // block_size)
        return sum(
            group.num_blocks * (min(length, group.most_blocks(rows, block_size)) if group.span else length)
            for group in self.groups
        )


def layout_of(sights: Sequence[LayerSight]) -> CacheLayout:
    """Return the layout of a model with layers that read `sights`; layers of the same sight are a group."""
    kinds = sorted(set(sights), key=lambda sight: (sight != LayerSight(), -(sight.window + sight.chunk), sight.chunk))
    members = [tuple(layer for layer, own in enumerate(sights) if own == kind) for kind in kinds]
    each = layers_a_block([len(layers) for layers in members])
    groups, places, first = [], dict[int, tuple[int, int]](), 0
    for kind, layers in zip(kinds, members, strict=True):
        count = -(-len(layers) // each)
        groups.append(CacheGroup(count, kind.window, kind.chunk, kind.align))
        for number, layer in enumerate(layers):
            places[layer] = (first + number // each, number % each)
        first += count
    return CacheLayout(tuple(groups), each, tuple(places[layer] for layer in range(len(sights))), tuple(members))


def layers_a_block(sizes: Iterable[int]) -> int:
    """Return the most layers a block such that no group of these sizes loses much to places without a layer."""
    sizes = tuple(sizes)
    return next(
        each
        for each in range(max(sizes), 0, -1)
        if all(-(-size // each) * each <= size * (1 + _MOST_SPARE) for size in sizes)
    )
