"""GGUF: all tensors in one file, matrices by rows of blocks of 32 or 256 numbers. Layout of llama.cpp's ggml-quants.

A block contains its scales. The C++ kernels multiply blocks of most types as they are
(layers/linear/gguf_blocks.py). Elsewhere Q4_0, Q4_1 and Q4_K map to our int4 to the bit, and the others become numbers
of the dtype. What else differs from Hugging Face's tensors is a row of `common.gguf_architectures` and of
`gguf_tensors`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.common.gguf_architectures import architecture_of
from penstock.common.gguf_file import TYPES, GgufTensor
from penstock.common.gguf_parts import GGUF_FILE, read_gguf
from penstock.common.progress import CountBytes
from penstock.generation.devices.torch_dtypes import STORED_DTYPES
from penstock.generation.host.mapped import MappedFile
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, WholeRows
from penstock.generation.layers.linear.gguf_blocks import BLOCK_TYPES
from penstock.generation.weights.quantised.gguf_tensors import named_tensors
from penstock.generation.weights.safetensors_folder import PIECE_BYTES

# ggml's types with a form of whole numbers.
WHOLE_TYPES = {"Q4_0": INT4, "Q4_1": INT4_ASYMMETRIC, "Q4_K": INT4_ASYMMETRIC}
_BLOCK_BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}
_TURNED = re.compile(r".*\.self_attn\.(q|k)_proj\.\w+")
_SHOWN = 5


class GgufCheckpoint:
    """A Checkpoint and checkpoint_weights.TensorSource of a GGUF file."""

    def __init__(self, folder: Path, progress: CountBytes | None = None) -> None:
        """Read the header. Raises StartupError naming the file, or a tensor that no model here has."""
        self.folder = folder
        self._file = read_gguf(folder / GGUF_FILE)
        self._progress = progress
        self._row = architecture_of(self._file)
        found = named_tensors(self._file, self._row)
        self._made = found.made
        # With the sources of tensors that are made.
        self._names: dict[str, GgufTensor] = {**found.stored, **found.sources}
        self._visible = dict.fromkeys((*found.stored, *found.made))
        # Of each head, for the order of rows.
        name = self._file.architecture
        heads = self._file.whole(f"{name}.attention.head_count", 1, least=1) or 1
        self._heads = {"q": heads, "k": heads}
        if self._row.is_turned:
            self._heads["k"] = self._file.whole(f"{name}.attention.head_count_kv", heads, least=1) or 1
        self._total = sum(tensor.end - tensor.begin for tensor in self._names.values())
        self._done = 0
        self._ends: dict[Path, int] = {}
        for tensor in self._names.values():
            self._ends[tensor.path] = max(tensor.end, self._ends.get(tensor.path, 0))
        self._taken: set[str] = set()
        self._mapped: MappedFile | None = None

    def names(self) -> Iterable[str]:
        """Return Hugging Face's names of all tensors, in the order of the file."""
        return self._visible

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._visible

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise StartupError naming missing, unexpected and wrongly shaped tensors."""
        missing = [name for name in expected if name not in self._visible]
        if missing:
            raise self._file.error(f"lacks tensors {', '.join(missing[:_SHOWN])} that its facts ask for")
        shapes = {**expected, **optional}
        for name in self._visible:
            if name not in shapes:
                raise self._file.error(f"has unexpected tensor {name}")
            if (shape := self.shape(name)) != shapes[name]:
                asked = list(shapes[name])
                raise self._file.error(f"tensor {name} has shape {list(shape)}, its facts ask for {asked}")

    def leave_out(self, prefix: str) -> None:
        for tensor in [name for name in self._visible if name.startswith(prefix)]:
            del self._visible[tensor]

    def dtype(self, tensor: str) -> torch.dtype | None:
        if tensor in self._made:
            are_plain = all(self._names[one].type.name in STORED_DTYPES for one in self._made[tensor].sources)
            return torch.float32 if are_plain else None
        return STORED_DTYPES.get(self._names[tensor].type.name)

    def shape(self, tensor: str) -> tuple[int, ...]:
        if (made := self._made.get(tensor)) is not None:
            empty = [torch.empty(self._names[one].shape, device="meta") for one in made.sources]
            return tuple(self._make(tensor, empty).shape)
        return self._names[tensor].shape

    def take(self, tensor: str) -> Tensor:
        if (made := self._made.get(tensor)) is not None:
            return self._make(tensor, [self._taken_whole(one).float() for one in made.sources])
        return self._taken_whole(tensor)

    def _taken_whole(self, tensor: str) -> Tensor:
        pieces = list(self._pieces(tensor))
        if len(pieces) > 1:
            return torch.cat(pieces)
        # Numbers that are stored as they are come as a view of the file.
        return pieces[0].clone() if self._names[tensor].type.name in STORED_DTYPES else pieces[0]

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        self._read(tensor)
        return self._memory(self._names[tensor].path), self._names[tensor].begin

    def are_equal(self, one: str, other: str) -> bool:
        """Blocks are equal if their bytes are."""
        if one in self._made or other in self._made or self._names[one].type != self._names[other].type:
            return False
        pairs = zip(self._stored(one), self._stored(other), strict=True)
        return all(torch.equal(first, second) for first, second in pairs)

    def is_quantised(self, tensor: str) -> bool:
        return self.dtype(tensor) is None

    def form(self, tensor: str) -> str:
        return "" if tensor in self._made else WHOLE_TYPES.get(self._names[tensor].type.name, "")

    def block_type(self, tensor: str) -> str:
        made = self._made.get(tensor)
        if made is None and tensor not in self._names:
            return ""
        if made is not None and made.recipe.rows is None:
            return ""
        found = {self._names[one].type.name for one in (made.sources if made is not None else (tensor,))}
        return found.pop() if len(found) == 1 and found <= BLOCK_TYPES.keys() else ""

    def block_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        return self._stored(tensor, multiple)

    def block_row(self, tensor: str, number: int) -> Tensor:
        made = self._made.get(tensor)
        if made is None or made.recipe.rows is None:
            raise TypeError(f"{tensor} is one matrix")
        return made.recipe.rows([self._matrix(one, number) for one in made.sources])

    def _matrix(self, tensor: str, number: int) -> Tensor:
        """Return the rows (outputs, bytes) of one matrix of a stored tensor."""
        stored = self._names[tensor]
        size = (stored.end - stored.begin) // stored.shape[0]
        begin = stored.begin + number * size
        part = replace(stored, shape=stored.shape[1:], begin=begin, end=begin + size)
        return torch.cat(list(self._stored(tensor, part=part)))

    def row(self, tensor: str, number: int) -> Tensor:
        if (made := self._made.get(tensor)) is None:
            return self._row_of(tensor, number)
        return self._make(tensor, [self._row_of(one, number).float()[None] for one in made.sources])[0]

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        if tensor in self._made:
            yield self.take(tensor)
        else:
            yield from self._pieces(tensor, multiple)

    def dense(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], int]:
        """Return all tensors by their names, blocks as `dtype` and others as they are stored, and the number of those
        in blocks."""
        found: dict[str, Tensor] = {}
        for name in self._visible:
            value = self.take(name)
            found[name] = value.to(dtype) if self.is_quantised(name) else value
        return found, sum(map(self.is_quantised, found))

    def _make(self, tensor: str, sources: list[Tensor]) -> Tensor:
        """Make a tensor of others. Raises StartupError naming it if their shapes do not fit."""
        try:
            return self._made[tensor].recipe.make(sources, self._file)
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(str(list(one.shape)) for one in sources)
            raise self._file.error(f"has tensors of shapes {shapes}: no {tensor} can be made of them") from error

    def _row_of(self, tensor: str, number: int) -> Tensor:
        """Return one row of a stored tensor, without reading the others."""
        return next(self._pieces(tensor, part=self._part(tensor, number)))[0]

    def _part(self, tensor: str, number: int) -> GgufTensor:
        """Return where one row of a stored tensor is."""
        stored = self._names[tensor]
        size = (stored.end - stored.begin) // stored.shape[0]
        begin = stored.begin + number * size
        return replace(stored, shape=(1, *stored.shape[1:]), begin=begin, end=begin + size)

    def _pieces(self, tensor: str, multiple: int = 1, part: GgufTensor | None = None) -> Iterator[Tensor]:
        stored = part or self._names[tensor]
        numbers = _NUMBERS.get(stored.type.name)
        offset = self._norm_offset(tensor)
        for rows in self._stored(tensor, multiple, part):
            if numbers is None:
                dtype = STORED_DTYPES[stored.type.name]
                # A file may begin its tensors at any byte.
                piece = (rows.clone() if rows.data_ptr() % dtype.itemsize else rows).view(dtype)
            else:
                piece = numbers(rows.view(-1, stored.type.num_bytes))
            if offset:
                piece = piece.float() - offset
            yield piece.view(len(rows), *stored.shape[1:]) if len(stored.shape) > 1 else piece.flatten()

    def _norm_offset(self, tensor: str) -> float:
        """Return the number that was added to a norm in the file."""
        if not self._row.norm_offset or not tensor.endswith("norm.weight"):
            return 0.0
        is_plain = tensor.removesuffix(".weight").endswith(self._row.plain_norms)
        return 0.0 if is_plain and self._row.plain_norms else self._row.norm_offset

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[WholeRows]:
        stored = self._names[tensor].type
        whole = _WHOLE[stored.name]
        for rows in self._stored(tensor, multiple):
            values, scale, offset = whole(rows.view(-1, stored.num_bytes))
            yield WholeRows(
                values.view(len(rows), -1),
                scale.reshape(len(rows), -1),
                None if offset is None else offset.reshape(len(rows), -1),
            )

    def _stored(self, tensor: str, multiple: int = 1, part: GgufTensor | None = None) -> Iterator[Tensor]:
        """Yield the rows' bytes (rows, bytes) as uint8, some at a time, in the model's order, as views of the file
        where that is the file's order. A vector is a row, or rows of one number each where they have another order in
        the file. `part`: of the tensor's rows, which have no order of their own."""
        stored = part or self._names[tensor]
        order = None if part is not None else self._order(tensor)
        is_matrix = len(stored.shape) > 1
        count = stored.shape[0] if is_matrix or order is not None else 1
        num_bytes = stored.end - stored.begin
        with warnings.catch_warnings():
            # torch warns that the memory cannot be written; it must not be.
            warnings.simplefilter("ignore", UserWarning)
            memory = self._memory(stored.path).memory
            data = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=stored.begin).view(count, -1)
        some = max(1, PIECE_BYTES // (4 * max(1, math.prod(stored.shape) // count)) // multiple) * multiple
        for first in range(0, count, some):
            last = min(first + some, count)
            yield data[first:last] if order is None else data[order[first:last]]
        # Pages that were read are freed with the mapping, which the last piece holds.
        del data, memory
        self._mapped = None
        self._read(tensor)

    def _order(self, tensor: str) -> Tensor | None:
        """Return the place in the file of each row; None: they are in order."""
        match = _TURNED.fullmatch(tensor) if self._row.is_turned else None
        if match is None:
            return None
        rows, heads = self.shape(tensor)[0], self._heads[match[1]]
        if rows % (2 * heads):
            raise self._file.error(f"has {heads} heads, and tensor {tensor} has {rows} rows")
        # In the file the two halves of a head are interleaved.
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def _memory(self, path: Path) -> MappedFile:
        if self._mapped is None or self._mapped.path != path:
            try:
                self._mapped = MappedFile(path)
            except OSError as error:
                raise self._file.error(f"cannot be read: {error.strerror}") from error
            if len(self._mapped.memory) < self._ends[path]:
                raise self._file.error("changed while it was being loaded")
        return self._mapped

    def _read(self, tensor: str) -> None:
        """Note that the tensor is read."""
        if tensor in self._taken:
            return
        self._taken.add(tensor)
        self._done += self._names[tensor].end - self._names[tensor].begin
        if self._progress is not None:
            self._progress(self._done, self._total)


def block_numbers(name: str, rows: Tensor) -> Tensor:
    """Return the numbers of rows (rows, bytes) in blocks of the type `name`, as float32 (rows, inputs)."""
    return _NUMBERS[name](rows.reshape(-1, _BLOCK_BYTES[name])).reshape(len(rows), -1)


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 at byte `first` of each block as float32 (…, 1)."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """Return the low halves, then the high ones (blocks, 2 * bytes)."""
    return torch.cat([octets & 15, octets >> 4], dim=1)


def _fifth_bits(octets: Tensor) -> Tensor:
    """Return 16 for numbers with the fifth bit set, else 0, in the numbers' order."""
    bits = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16.0)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


# Sixteen numbers for codes of four bits.
_IQ4_NUMBERS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
_FP4_NUMBERS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _IQ4_NUMBERS[_nibbles(blocks[:, 2:]).int()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    # Of each group 4 bits of one scale, and 2 more in the word at byte 2.
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)
    high = (blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
    step = _half(blocks, 0) * ((low | high << 4).float() - 32.0)
    numbers = _IQ4_NUMBERS[_nibbles(blocks[:, 8:].reshape(-1, 16)).int()].view(-1, 8, 32)
    return step[:, :, None] * numbers


def _mxfp4(blocks: Tensor) -> Tensor:
    # The table has doubled numbers.
    return torch.ldexp(_FP4_NUMBERS[_nibbles(blocks[:, 1:]).int()], blocks[:, :1].int() - 128)


def _two_bits(octets: Tensor) -> Tensor:
    """Return the numbers of 2 bits (blocks, 256) of 64 bytes: of each half, the lowest bits of its 32 bytes first."""
    halves = octets.reshape(-1, 2, 1, 32)
    return (halves >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    step, least = _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    numbers = _two_bits(blocks[:, 16:80]).float().view(-1, 16, 16)
    return step[:, :, None] * numbers - least[:, :, None]


def _q3_k(blocks: Tensor) -> Tensor:
    octets = blocks[:, 96:108]
    low = torch.cat([octets[:, :8] & 15, octets[:, :8] >> 4], dim=1)
    high = (octets[:, None, 8:] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3).flatten(1) << 4
    step = _half(blocks, 108) * ((low | high).float() - 32.0)
    third = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1).flatten(1)
    numbers = _two_bits(blocks[:, 32:96]).float() - 4.0 * (1 - third.float())
    return step[:, :, None] * numbers.view(-1, 16, 16)


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of 12 bytes, as float32."""
    first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=1)
    return scales.float(), minima.float()


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and the least number of each group of 32 (blocks, 8)."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return _half(blocks, 0) * scales, _half(blocks, 2) * -minima


def _four_bits(octets: Tensor) -> Tensor:
    """Return the numbers of 4 bits (blocks, 8, 32) of 128 bytes: of 32 bytes the low halves, then the high ones."""
    parts = octets.reshape(-1, 4, 1, 32)
    return (parts >> torch.tensor([0, 4], dtype=torch.uint8).view(2, 1) & 15).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    step, least = _q4_k_scales(blocks)
    return step[:, :, None] * _four_bits(blocks[:, 16:]).float() + least[:, :, None]


def _q5_k(blocks: Tensor) -> Tensor:
    step, least = _q4_k_scales(blocks)
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1) << 4
    return step[:, :, None] * (_four_bits(blocks[:, 48:]) | fifth).float() + least[:, :, None]


def _q6_k(blocks: Tensor) -> Tensor:
    halves = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = (halves >> torch.tensor([0, 4], dtype=torch.uint8).view(2, 1) & 15).reshape(-1, 2, 4, 32)
    top = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (top >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3) << 4
    numbers = ((low | high).float() - 32.0).view(-1, 16, 16)
    step = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return step[:, :, None] * numbers


# (blocks, bytes) as uint8 -> their numbers as float32.
_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
# (blocks, bytes) as uint8 -> whole numbers, scales and offsets of each 32 of them, as WholeRows has those of a form.
_WHOLE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "Q4_0": lambda blocks: (_nibbles(blocks[:, 2:]), _half(blocks, 0), None),
    "Q4_1": lambda blocks: (_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q4_K": lambda blocks: (_four_bits(blocks[:, 16:]), *_q4_k_scales(blocks)),
}
