"""Interfaces of quantised checkpoints: a format checks `quantization_config` and opens matrices.

A matrix gives its rows as numbers, and as whole numbers with scales if a product of ours has exactly that format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.dtypes import COMPUTED
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, INT8, WholeRows
from penstock.generation.layers.linear.native import GROUP

FIELD = "quantization_config"
FLOATS = tuple(one.stored for one in COMPUTED.values())
# Ending of the advice that comes with a refusal.
UNQUANTISED = "give the model's unquantised checkpoint, which --quantization int8 and int4 quantise as they load"
_INT4 = (-8, 7)
_INT8 = (-128, 127)


class StoredFiles(Protocol):
    """The facts of a folder's tensors that a format needs before it reads any."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts in the files' headers."""

    def __contains__(self, tensor: str) -> bool: ...

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the tensor's stored shape."""

    def stored_as(self, tensor: str) -> str:
        """Return safetensors' name of the dtype."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor of a quantised matrix: its required shape, and safetensors' names of its allowed dtypes."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    # False: it may be missing.
    is_required: bool = True


class StoredMatrix(ABC):
    """A quantised matrix (outputs, inputs)."""

    # Format of `whole_rows`, int8, int4 or int4-asymmetric; empty: there is none.
    form: str = ""
    # Type of `block_rows` (layers.linear.gguf_blocks); empty: there is none.
    block_type: str = ""

    @abstractmethod
    def rows(self, first: int, last: int) -> Tensor:
        """Return rows from `first` to `last` as float32."""

    def whole_rows(self, first: int, last: int) -> WholeRows:
        """Return the same rows exactly, as whole numbers and scales. Call it only if there is a `form`."""
        raise TypeError("the matrix has no form of whole numbers")

    def block_rows(self, first: int, last: int) -> Tensor:
        """Return the same rows exactly, as blocks: (rows, bytes) of uint8. Call it only if there is a `block_type`."""
        raise TypeError("the matrix has no blocks")


class QuantFormat(ABC):
    """A format of stored matrices, in the variant of `quantization_config`. Its constructor takes that and raises
    StartupError naming the unsupported field."""

    # Value of quantization_config.quant_method.
    method: str
    # In words, with the variant.
    description: str
    # Usual format of its matrices, or empty; for an estimate of memory.
    form: str = ""

    @abstractmethod
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        """Return the tensors of the matrix of `module` with this shape, by their names after `module`.

        None: it is not quantised, and stored as `module`.weight. Raises StartupError for an unsupported matrix.
        """

    @abstractmethod
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of the tensors that `parts` named, as far as they are there. Raises StartupError naming a
        tensor with numbers that contradict the rest."""

    def stacked_parts(self, tensor: str, shape: tuple[int, int, int], files: StoredFiles) -> dict[str, Part] | None:
        """Return the parts of all experts' matrices `tensor` (experts, inputs, outputs), by their names after it, each
        with the experts first.

        None: they are not quantised. Raises StartupError for unsupported ones.
        """
        return None

    def stacked_blocks(self, parts: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        """Return the type (layers.linear.gguf_blocks) and the rows (outputs, bytes) of one expert's matrix, of its
        `stacked_parts`."""
        raise TypeError(f"{self.method} has no stacked matrices")


@dataclass(frozen=True, slots=True)
class GroupedMatrix(StoredMatrix):
    """Whole numbers, less a zero, times a scale; both of a group of inputs of each output."""

    shape: tuple[int, int]
    # (first, last) -> (rows, inputs) whole numbers of `levels`, counted from `lowest`, as uint8 or int8.
    unpack: Callable[[int, int], Tensor]
    lowest: int
    levels: int
    # (outputs, groups) in float32.
    scale: Tensor
    # (outputs, groups) in int32, or one number for all.
    zero: Tensor | int
    # Inputs of a group; those of the last one may be fewer.
    group: int
    # (inputs) groups of the inputs if these are not in order; None: consecutive groups of `group`.
    group_of_input: Tensor | None = None
    form: str = field(init=False)
    block_type: str = field(init=False)

    def __post_init__(self) -> None:
        least, most = (self.zero, self.zero) if isinstance(self.zero, int) else map(int, self.zero.aminmax())
        if least == most:
            object.__setattr__(self, "zero", least)
        # A configuration may contain any number.
        object.__setattr__(self, "group", min(self.group, self.shape[1]))
        object.__setattr__(self, "form", self._form(least, most))
        object.__setattr__(self, "block_type", "" if self.form else self._block_type(least, most))

    @override
    def rows(self, first: int, last: int) -> Tensor:
        numbers = self.unpack(first, last).float()
        zero = self.zero if isinstance(self.zero, int) else self.zero[first:last].float()
        scale = self.scale[first:last]
        if self.group_of_input is not None:
            numbers.sub_(zero if isinstance(zero, int) else zero[:, self.group_of_input])
            return numbers.mul_(scale[:, self.group_of_input])
        for part, groups in self._parts(numbers):
            part.sub_(zero if isinstance(zero, int) else zero[:, groups, None])
            part.mul_(scale[:, groups, None])
        return numbers

    @override
    def whole_rows(self, first: int, last: int) -> WholeRows:
        if self.form == INT4_ASYMMETRIC:
            return self._asymmetric_rows(first, last)
        values = self.unpack(first, last)
        scale = self.scale[first:last]
        # Numbers that int8 and int4 count from.
        base = 0 if self.form == INT8 else _INT4[0]
        if not isinstance(self.zero, int):
            values = values.to(torch.int16)
            for part, groups in self._parts(values):
                part.sub_(self.zero[first:last, groups, None].to(torch.int16))
            values = values.sub_(base)
        elif self.zero != -base:
            values = values.to(torch.int16).sub_(self.zero + base)
        if self.form == INT8:
            return WholeRows(values.to(torch.int8), scale[:, 0].contiguous())
        return WholeRows(values.to(torch.uint8), self._repeated(scale))

    @override
    def block_rows(self, first: int, last: int) -> Tensor:
        assert isinstance(self.zero, int)
        numbers = self.unpack(first, last)
        if self.zero:
            numbers = numbers.to(torch.int16).sub_(self.zero)
        scale = self._repeated(self.scale[first:last]).half()
        bytes_of_numbers = numbers.to(torch.int8).view(torch.uint8).view(*scale.shape, GROUP)
        return torch.cat([scale.view(torch.uint8).view(*scale.shape, 2), bytes_of_numbers], dim=2).flatten(1)

    def _asymmetric_rows(self, first: int, last: int) -> WholeRows:
        """Return rows as stored, with a zero's subtrahend as the offset."""
        values = self.unpack(first, last)
        if self.lowest:
            values = values.to(torch.int16).sub_(self.lowest).to(torch.uint8)
        scale = self.scale[first:last]
        zero = self.zero if isinstance(self.zero, int) else self.zero[first:last]
        return WholeRows(values, self._repeated(scale), self._repeated(scale * (self.lowest - zero)))

    def _repeated(self, groups: Tensor) -> Tensor:
        """Return numbers per group (rows, groups), repeated for int4's smaller groups."""
        repeated = groups.repeat_interleave(-(-self.group // GROUP), dim=1)
        return repeated[:, : -(-self.shape[1] // GROUP)].contiguous()

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield views (rows, groups, inputs of a group) of contiguous rows, each with its groups: whole ones, and a
        short one at the end."""
        whole = self.shape[1] // self.group
        if whole:
            yield rows[:, : whole * self.group].view(len(rows), whole, self.group), slice(0, whole)
        if self.shape[1] % self.group:
            yield rows[:, None, whole * self.group :], slice(whole, whole + 1)

    def _form(self, least: int, most: int) -> str:
        """Return the format of numbers with zeros from `least` to `most`."""
        if self.group_of_input is not None:
            return ""
        low, high = self.lowest - most, self.lowest + self.levels - 1 - least
        is_single = self.scale.shape[1] == 1
        if self.levels <= 16 and (is_single or self.group % GROUP == 0):
            return INT4 if low >= _INT4[0] and high <= _INT4[1] else INT4_ASYMMETRIC
        return INT8 if is_single and low >= _INT8[0] and high <= _INT8[1] else ""

    def _block_type(self, least: int, most: int) -> str:
        """Return the type of blocks that hold the numbers exactly, of those with zeros from `least` to `most`: whole
        numbers of a byte beside scales in float16."""
        low, high = self.lowest - most, self.lowest + self.levels - 1 - least
        is_regular = self.group_of_input is None and not self.group % GROUP and not self.shape[1] % GROUP
        if not is_regular or least != most or low < _INT8[0] or high > _INT8[1]:
            return ""
        return "Q8_0" if torch.equal(self.scale.half().float(), self.scale) else ""


@dataclass(frozen=True, slots=True)
class ScaledMatrix(StoredMatrix):
    """Numbers of a short floating-point dtype, times a scale of each block of them."""

    # (outputs, inputs)
    weight: Tensor
    # (blocks of outputs, blocks of inputs) in float32; a dimension of 1 is one block.
    scale: Tensor
    # Outputs and inputs of a block.
    block: tuple[int, int]

    @override
    def rows(self, first: int, last: int) -> Tensor:
        scale = self.scale
        if scale.shape[0] > 1:
            scale = scale[torch.arange(first, last) // self.block[0]]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.block[1], dim=1)[:, : self.weight.shape[1]]
        return self.weight[first:last].float().mul_(scale)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the whole numbers of `bits` bits in the last dimension of int32 words, the lowest first, as uint8.

    3 bits go on from a word to the next, 32 numbers in three; other numbers must divide a word.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    if 32 % bits:
        each = unpacked(words, 1)
        each = each.view(*each.shape[:-1], -1, bits)
        return sum((each[..., bit] << bit for bit in range(bits)), start=torch.zeros_like(each[..., 0]))
    octets = words.contiguous().view(torch.uint8)
    numbers = [octets >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.stack(numbers, dim=-1).flatten(-2)


def one_of(
    config: ConfigReader, name: str, allowed: tuple[object, ...], default: object, advice: str = UNQUANTISED
) -> object:
    """Return the field's value. Raises StartupError naming it when it is none of `allowed`."""
    value = config.values.get(name, default)
    if value is None:
        raise config.error(name, "is missing")
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        shown = ", ".join(map(repr, allowed))
        raise config.error(name, f"{value!r} is not supported; supported are {shown}: {advice}")
    return value


def refuse(config: ConfigReader, name: str, meaning: str, advice: str = UNQUANTISED) -> None:
    """Raise StartupError if the field is set: present and neither false nor empty."""
    if config.values.get(name):
        raise config.error(name, f"is not supported ({meaning}): {advice}")


def lying(module: str, tensor: str, problem: str) -> StartupError:
    """Return an error that names a tensor."""
    return StartupError(f"tensor {module}.{tensor} {problem}", flag="MODEL")


def check_bits(module: str, tensor: str, numbers: Tensor, bits: int) -> None:
    """Raise StartupError naming a tensor of int8 with whole numbers of more than `bits` bits."""
    if bits < 8 and numbers.numel():
        least, most = map(int, numbers.aminmax())
        if least < -(1 << (bits - 1)) or most >= 1 << (bits - 1):
            raise lying(module, tensor, f"has numbers from {least} to {most}, which are not of {bits} bits")
