"""int8 with a scale for each 32 inputs, of weights and of rows, over turned blocks (rounding/rotation.py): nearer to
float32 than int8, for a sixteenth more bytes. The C++ kernels multiply it as GGUF's Q8_0 (gguf_blocks.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.layers.linear import INT8_GROUPS
from penstock.generation.layers.linear.base import Weight
from penstock.generation.layers.linear.gguf_blocks import PANEL
from penstock.generation.rounding.rotation import halved, natural_scale, rotated, rotation_block

GROUP = 32
_BLOCK_TYPE = "Q8_0"
_MOST = 127.0
# Of a group of a panel in gguf_blocks.h: bytes of the numbers, and then of the scales.
_NUMBER_BYTES, _SCALE_BYTES = GROUP * PANEL, 2 * PANEL


class TurnedWeight:
    """A weight's rows as blocks: a layers.linear.base.BlockWeight."""

    def __init__(self, weight_OI: Tensor | Weight) -> None:
        """Take a weight with whole groups of inputs."""
        self.shape = (int(weight_OI.shape[0]), int(weight_OI.shape[1]))
        self.dtype = weight_OI.dtype
        self._weight = weight_OI

    def block_parts(self) -> Sequence[tuple[str, int]]:
        return self.parts(self.shape[0])

    @staticmethod
    def parts(outputs: int) -> Sequence[tuple[str, int]]:
        """Return `block_parts` of a weight of this many outputs."""
        return [(_BLOCK_TYPE, outputs)]

    def block_pieces(self) -> Iterator[Tensor]:
        pieces = [self._weight] if isinstance(self._weight, Tensor) else self._weight.pieces()
        return map(turned_groups, pieces)


def has_groups(inputs: int) -> bool:
    """True for a weight that has whole groups; another one is int8 with a scale a row."""
    return inputs % GROUP == 0


def turned_groups(weight_OI: Tensor) -> Tensor:
    """Return rows as blocks of Q8_0, (rows, bytes) in uint8: of each group its scale in float16, and its numbers from
    -127 to 127. A row that is not finite has a scale that is not."""
    rows, inputs = weight_OI.shape
    block = rotation_block(inputs)
    groups = (rotated(weight_OI, block) / halved(block)).view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / _MOST).half()
    # By the scale as it is stored: its own rounding costs nothing then.
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    numbers = (groups * inverse).round().clamp_(-_MOST, _MOST).nan_to_num(0.0).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), numbers.view(torch.uint8)), dim=-1).view(rows, -1)


def mean_scale_of_groups(weight: Tensor, inputs: int) -> float:
    """Return the mean scale of a packed weight, for numbers that keep their length when they are turned."""
    first, block = int(weight[:8].view(torch.int64)) >> 8, rotation_block(inputs)
    scale = weight[first:].view(-1, _NUMBER_BYTES + _SCALE_BYTES)[:, _NUMBER_BYTES:].contiguous().view(torch.float16)
    return natural_scale(float(scale[scale != 0].float().mean()) * halved(block) / block, block)


def refuse_int8_groups(where: str) -> StartupError:
    """Return the refusal of a device or a way of computing without such products."""
    return StartupError(
        f"--quantization {INT8_GROUPS} is for the C++ kernels on the CPU, in bfloat16 or float32, and {where}: "
        "use int8 here",
        flag="--quantization",
    )
