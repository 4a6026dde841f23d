"""Places of a model's layers in the blocks of the pool: layers that read the same positions share blocks.

The pool's blocks have one size, and a block holds the keys and values of `layers_a_block` layers. A group of layers has
as many blocks of the same tokens as it needs for all of them: a bundle (`CacheGroup.num_blocks`). So any free block
serves any group, and the memory is never divided between groups. The last block of a group may have places that no
layer uses, at most _MOST_SPARE of the group's layers; with fewer layers a block there are none, but more tables.

Where layers have keys of several widths, a place has the widest's, and narrower ones of a group share a place as far as
they fit side by side (slot_rows.py): such a place counts as one layer.
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
    # Of each layer: the first number of its keys in its place; empty: all begin there.
    columns: tuple[int, ...] = ()

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


def layout_of(sights: Sequence[LayerSight], widths: Sequence[int] = ()) -> CacheLayout:
    """Return the layout of a model with layers that read `sights`; layers of the same sight are a group. `widths`:
    numbers of a token's keys in each layer; empty: all are alike."""
    kinds = sorted(set(sights), key=lambda sight: (sight != LayerSight(), -(sight.window + sight.chunk), sight.chunk))
    members = [tuple(layer for layer, own in enumerate(sights) if own == kind) for kind in kinds]
    shared = [_side_by_side(layers, widths) for layers in members]
    each = layers_a_block([len(places) for places in shared])
    groups, first = [], 0
    places, columns = dict[int, tuple[int, int]](), dict[int, int]()
    for kind, of_group in zip(kinds, shared, strict=True):
        count = -(-len(of_group) // each)
        groups.append(CacheGroup(count, kind.window, kind.chunk, kind.align))
        for number, layers in enumerate(of_group):
            for layer, column in layers.items():
                places[layer] = (first + number // each, number % each)
                columns[layer] = column
        first += count
    order = range(len(sights))
    return CacheLayout(
        tuple(groups),
        each,
        tuple(places[layer] for layer in order),
        tuple(members),
        tuple(columns[layer] for layer in order) if widths else (),
    )


def _side_by_side(layers: Sequence[int], widths: Sequence[int]) -> list[dict[int, int]]:
    """Return the places of a group's layers: of each place, its layers and the column of each. Layers of one width
    share places."""
    if not widths:
        return [{layer: 0} for layer in layers]
    found: list[dict[int, int]] = []
    for width in sorted({widths[layer] for layer in layers}, reverse=True):
        own, fit = [layer for layer in layers if widths[layer] == width], max(widths) // width
        found += [
            {layer: number * width for number, layer in enumerate(own[first : first + fit])}
            for first in range(0, len(own), fit)
        ]
    return found


def layers_a_block(sizes: Iterable[int]) -> int:
    """Return the most layers a block such that no group of these sizes loses much to places without a layer."""
    sizes = tuple(sizes)
    return next(
        each
        for each in range(max(sizes), 0, -1)
        if all(-(-size // each) * each <= size * (1 + _MOST_SPARE) for size in sizes)
    )
