"""GGUF: all tensors in one file, matrices by rows of blocks of 32 or 256 numbers. Layout of llama.cpp's ggml-quants.

A block contains its scales. Q4_0, Q4_1 and Q4_K map to our int4 to the bit; the others become numbers of the dtype. In
the architecture llama the rows of the query's and the key's projections have another order in the file, which is
undone; in gemma3 norms are larger by one than Hugging Face's.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.common.gguf_file import GgufFile, GgufTensor
from penstock.common.gguf_folder import GGUF_FILE, ROPE_FACTORS
from penstock.common.progress import CountBytes
from penstock.generation.devices.torch_dtypes import STORED_DTYPES
from penstock.generation.host.mapped import MappedFile
from penstock.generation.layers.linear.base import INT4, INT4_ASYMMETRIC, WholeRows
from penstock.generation.weights.safetensors_folder import PIECE_BYTES

# ggml's types with a form of whole numbers.
WHOLE_TYPES = {"Q4_0": INT4, "Q4_1": INT4_ASYMMETRIC, "Q4_K": INT4_ASYMMETRIC}
# llama.cpp's names -> Hugging Face's, without `.weight` and `.bias`.
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Other names of an architecture.
_OWN_LAYER = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
# Number added to norms in the file.
_NORM_OFFSETS = {"gemma3": 1.0}
_NAME = re.compile(r"(?:blk\.([0-9]{1,6})\.)?(\w+)\.(weight|bias)")
_TURNED = re.compile(r".*\.self_attn\.(q|k)_proj\.\w+")
_SHOWN, _SHOWN_CHARS = 5, 80


class GgufCheckpoint:
    """A checkpoint_weights.TensorSource of a GGUF file."""

    def __init__(self, folder: Path, progress: CountBytes | None = None) -> None:
        """Read the header. Raises StartupError naming the file, or a tensor that no model here has."""
        self.folder = folder
        self._file = GgufFile(folder / GGUF_FILE)
        self._progress = progress
        self._names: dict[str, GgufTensor] = {}
        # Of each head, for the order of rows.
        name = self._file.architecture
        heads = self._file.whole(f"{name}.attention.head_count", 1, least=1) or 1
        self._heads = {"q": heads, "k": self._file.whole(f"{name}.attention.head_count_kv", heads, least=1) or 1}
        self._is_turned = name == "llama"
        self._norm_offset = _NORM_OFFSETS.get(name, 0.0)
        layer_names = {**_LAYER, **_OWN_LAYER.get(name, {})}
        unknown = []
        for found, tensor in self._file.tensors.items():
            ours = _hf_name(found, layer_names)
            if ours is not None:
                self._names[ours] = tensor
            elif found != ROPE_FACTORS:
                unknown.append(found)
        if unknown:
            raise self._file.error(
                f"has unexpected tensors {', '.join(name[:_SHOWN_CHARS] for name in unknown[:_SHOWN])}"
            )
        self._total = sum(tensor.end - tensor.begin for tensor in self._names.values())
        self._taken: set[str] = set()
        self._mapped: MappedFile | None = None

    def names(self) -> Iterable[str]:
        """Return Hugging Face's names of all tensors, in the order of the file."""
        return self._names

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._names

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise StartupError naming missing, unexpected and wrongly shaped tensors."""
        missing = [name for name in expected if name not in self._names]
        if missing:
            raise self._file.error(f"lacks tensors {', '.join(missing[:_SHOWN])} that its facts ask for")
        shapes = {**expected, **optional}
        for name, tensor in self._names.items():
            if name not in shapes:
                raise self._file.error(f"has unexpected tensor {name}")
            if tensor.shape != shapes[name]:
                asked = list(shapes[name])
                raise self._file.error(f"tensor {name} has shape {list(tensor.shape)}, its facts ask for {asked}")

    def dtype(self, tensor: str) -> torch.dtype | None:
        """See TensorSource."""
        return STORED_DTYPES.get(self._names[tensor].type.name)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._names[tensor].shape

    def take(self, tensor: str) -> Tensor:
        """See TensorSource."""
        pieces = list(self.pieces(tensor))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        """See TensorSource."""
        self._read(tensor)
        return self._memory(), self._names[tensor].begin

    def are_equal(self, one: str, other: str) -> bool:
        """See TensorSource. Blocks are equal if their bytes are."""
        if self._names[one].type != self._names[other].type:
            return False
        pairs = zip(self._stored(one), self._stored(other), strict=True)
        return all(torch.equal(first, second) for first, second in pairs)

    def is_quantised(self, tensor: str) -> bool:
        """See TensorSource."""
        return self.dtype(tensor) is None

    def form(self, tensor: str) -> str:
        """See TensorSource."""
        return WHOLE_TYPES.get(self._names[tensor].type.name, "")

    def row(self, tensor: str, number: int) -> Tensor:
        """See TensorSource."""
        return self.take(tensor)[number]

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """See TensorSource."""
        stored = self._names[tensor]
        numbers = _NUMBERS.get(stored.type.name)
        for rows in self._stored(tensor, multiple):
            if numbers is None:
                piece = rows.view(STORED_DTYPES[stored.type.name])
            else:
                blocks = rows.view(-1, stored.type.num_bytes)
                piece = numbers(blocks).view(len(rows), stored.shape[-1])
            if self._norm_offset and tensor.endswith("norm.weight"):
                piece = piece.float() - self._norm_offset
            yield piece if len(stored.shape) > 1 else piece.flatten()

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[WholeRows]:
        """See TensorSource."""
        stored = self._names[tensor].type
        whole = _WHOLE[stored.name]
        for rows in self._stored(tensor, multiple):
            values, scale, offset = whole(rows.view(-1, stored.num_bytes))
            yield WholeRows(
                values.view(len(rows), -1),
                scale.reshape(len(rows), -1),
                None if offset is None else offset.reshape(len(rows), -1),
            )

    def _stored(self, tensor: str, multiple: int = 1) -> Iterator[Tensor]:
        """Yield the rows' bytes (rows, bytes) as uint8, some at a time, in the model's order. A vector is a row, or
        rows of one number each where they have another order in the file."""
        stored = self._names[tensor]
        order = self._order(tensor)
        is_matrix = len(stored.shape) > 1
        count = stored.shape[0] if is_matrix or order is not None else 1
        num_bytes = stored.end - stored.begin
        with warnings.catch_warnings():
            # torch warns that the memory cannot be written; it must not be.
            warnings.simplefilter("ignore", UserWarning)
            memory = self._memory().memory
            data = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=stored.begin).view(count, -1)
        some = max(1, PIECE_BYTES // (4 * max(1, math.prod(stored.shape) // count)) // multiple) * multiple
        for first in range(0, count, some):
            last = min(first + some, count)
            yield data[first:last].clone() if order is None else data[order[first:last]]
        # Pages that were read are freed with the mapping.
        del data, memory
        self._mapped = None
        self._read(tensor)

    def _order(self, tensor: str) -> Tensor | None:
        """Return the place in the file of each row; None: they are in order."""
        match = _TURNED.fullmatch(tensor) if self._is_turned else None
        if match is None:
            return None
        rows, heads = self.shape(tensor)[0], self._heads[match[1]]
        if rows % (2 * heads):
            raise self._file.error(f"has {heads} heads, and tensor {tensor} has {rows} rows")
        # In the file the two halves of a head are interleaved.
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def _memory(self) -> MappedFile:
        if self._mapped is None:
            try:
                self._mapped = MappedFile(self._file.path)
            except OSError as error:
                raise self._file.error(f"cannot be read: {error.strerror}") from error
            if len(self._mapped.memory) < max((tensor.end for tensor in self._names.values()), default=0):
                raise self._file.error("changed while it was being loaded")
        return self._mapped

    def _read(self, tensor: str) -> None:
        """Note that the tensor is read."""
        self._taken.add(tensor)
        if self._progress is not None:
            done = sum(self._names[name].end - self._names[name].begin for name in self._taken)
            self._progress(done, self._total)


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    """Return Hugging Face's name of a tensor, `layer_names`: those within a layer; None: there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    found = _ENDS.get(module) if layer is None else layer_names.get(module)
    if found is None:
        return None
    return f"{found}.{kind}" if layer is None else f"model.layers.{int(layer)}.{found}.{kind}"


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
}
# (blocks, bytes) as uint8 -> whole numbers, scales and offsets of each 32 of them, as WholeRows has those of a form.
_WHOLE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "Q4_0": lambda blocks: (_nibbles(blocks[:, 2:]), _half(blocks, 0), None),
    "Q4_1": lambda blocks: (_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q4_K": lambda blocks: (_four_bits(blocks[:, 16:]), *_q4_k_scales(blocks)),
}
