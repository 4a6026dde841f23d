"""Random matrices in the blocks of GGUF's types, and their numbers by the reader of weights/quantised/gguf.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from penstock.common.gguf_file import TYPES
from penstock.generation.layers.linear.gguf_blocks import BLOCK_TYPES
from penstock.generation.weights.quantised.gguf import block_numbers
from torch import Tensor

# Bytes of a block at which float16 scales and offsets begin.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
NAMES = tuple(BLOCK_TYPES)


def inputs_of(name: str) -> int:
    """Inputs of a block."""
    return TYPES[BLOCK_TYPES[name]].numbers


def random_blocks(name: str, outputs: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Rows (outputs, bytes) of any codes, with scales of usual size."""
    kind = TYPES[BLOCK_TYPES[name]]
    shape = (outputs * inputs // kind.numbers, kind.num_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for first in _HALVES[name]:
        # Scales of 256 numbers are times whole numbers of up to 63 or 127.
        usual = 2e-3 if kind.numbers == 32 else 1e-4
        halves = torch.randn(shape[0], generator=generator).mul_(usual).half()
        blocks[:, first : first + 2] = halves[:, None].view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(118, 123, shape[:1], dtype=torch.uint8, generator=generator)
    return blocks.view(outputs, -1)


def numbers(name: str, rows: Tensor) -> Tensor:
    """The rows' numbers in float32."""
    return block_numbers(name, rows)


class Blocks:
    """A layers.linear.base.BlockWeight of random matrices: `parts` are names of types and numbers of rows."""

    def __init__(
        self, parts: Sequence[tuple[str, int]], inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parts = list(parts)
        self.rows = [random_blocks(name, count, inputs, generator) for name, count in parts]
        self.shape = (sum(count for _, count in parts), inputs)
        self.dtype = dtype

    def block_parts(self) -> list[tuple[str, int]]:
        return self.parts

    def block_pieces(self) -> Iterator[Tensor]:
        """Two of each matrix."""
        for rows in self.rows:
            yield from rows.tensor_split(2)

    @property
    def numbers(self) -> Tensor:
        """All numbers in float32."""
        return torch.cat([numbers(name, rows) for (name, _), rows in zip(self.parts, self.rows, strict=True)])
