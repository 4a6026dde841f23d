"""The layout of a packed file: safetensors; all bytes except the numbers follow from config.json and a few facts.

Tensors lie in the order in which a step reads them, each at a multiple of 64 bytes; `padding.N` fills the space between
them, since safetensors allows no gaps. A reader computes the place of each tensor and does not trust the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

import torch

from penstock.generation.core.model_config import ModelConfig
from penstock.generation.devices.torch_dtypes import stored_name
from penstock.generation.layers.linear.native import LAYOUT_VERSION, formats, part_sizes
from penstock.generation.weights.tensor_names import (
    EMBEDDING,
    INPUT_TABLE,
    LM_HEAD,
    MODEL_PREFIX,
    NORM,
    choice_biases,
    layer_linears,
    layer_norms,
    layer_prefix,
    model_linears,
    model_norms,
    rounds_once,
    state_tensors,
)

FORMAT = "penstock packed weights"
# Version of this file's rules; the kernels' own layout has a version, too.
FORMAT_VERSION = 1
ALIGNMENT = 64
# The head's matrix without `.weight`: its parts are named like those of the layers' matrices.
HEAD = LM_HEAD.removesuffix(".weight")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class PackedFacts:
    """Facts in the header in addition to the tensors. All are text, as in safetensors."""

    dtype: str
    quantization: str
    # Name of the checkpoint, and SHA-256 of its files as JSON.
    source: str = ""
    source_sha256: str = "{}"
    # Name -> format of the matrices that kept a quantised checkpoint's whole numbers, as JSON.
    kept: str = "{}"
    # SHA-256 of all bytes after the header.
    sha256: str = _NO_DIGEST
    # Version of Penstock, for people.
    written_by: str = ""
    format: str = FORMAT
    format_version: str = str(FORMAT_VERSION)
    layout_version: str = str(LAYOUT_VERSION)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor, and the place of its bytes after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str,
    *,
    has_table: bool,
    kept: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, PackedTensor]:
    """Return every tensor of the file, in order. `has_table`: the embedding is a tensor of its own, not the head's
    rows. `kept`: as PackedFacts.kept. The kernels must be loaded."""
    places: dict[str, PackedTensor] = {}
    end = 0
    for name, kind, shape in _tensors(config, dtype, quantization, has_table, kept):
        size = kind.itemsize * torch.Size(shape).numel()
        places[name] = PackedTensor(kind, shape, end, end + size)
        end += size
        if gap := -end % ALIGNMENT:
            places[f"padding.{len(places)}"] = PackedTensor(torch.uint8, (gap,), end, end + gap)
            end += gap
    return places


def header(places: dict[str, PackedTensor], facts: PackedFacts) -> bytes:
    """Return the file's first bytes; their length does not depend on the digest. The tensors begin after them,
    aligned."""
    entries: dict[str, object] = {"__metadata__": asdict(facts)}
    entries |= entries_of(places)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def entries_of(places: dict[str, PackedTensor]) -> dict[str, object]:
    """Return the entries as safetensors writes them."""
    return {
        name: {"dtype": stored_name(place.dtype), "shape": list(place.shape), "data_offsets": [place.begin, place.end]}
        for name, place in places.items()
    }


_Entry = tuple[str, torch.dtype, tuple[int, ...]]


def _tensors(
    config: ModelConfig, dtype: torch.dtype, quantization: str, has_table: bool, kept: Mapping[str, str]
) -> list[_Entry]:
    layers, head = formats(dtype, quantization)
    table = (config.vocab_size, config.hidden_size)

    def parts(name: str, sizes: dict[str, tuple[torch.dtype, int]]) -> list[_Entry]:
        return [(f"{name}.{part}", kind, (count,)) for part, (kind, count) in sizes.items()]

    found = parts(HEAD, part_sizes(table, head, gated=False, has_bias=False, kept=kept.get(HEAD, "")))
    if has_table:
        found.append((EMBEDDING, dtype, table))
    exact = formats(dtype, "none")[0]
    if config.layer_inputs is not None:
        inputs = config.layer_inputs
        found.append((INPUT_TABLE, dtype, (inputs.vocab_size, config.num_layers * inputs.dim)))
    norm_dtype = torch.float32 if rounds_once(config) else dtype
    found += [(name, norm_dtype, (width,)) for name, width in model_norms(config).items()]
    for one in model_linears(config):
        name = f"{MODEL_PREFIX}{one.name}"
        sizes = part_sizes(one.shape, layers, gated=False, has_bias=False, kept=kept.get(name, ""))
        found += parts(name, sizes)
    for index in range(config.num_layers):
        prefix = layer_prefix(index)
        found += [(f"{prefix}{name}", norm_dtype, (width,)) for name, width in layer_norms(config, index).items()]
        biases = choice_biases(config, index).items()
        found += [(f"{prefix}{name}", torch.float32, (width,)) for name, width in biases]
        found += [(f"{prefix}{name}", torch.float32, shape) for name, shape in state_tensors(config, index).items()]
        for one in layer_linears(config, index):
            if one.is_matrix:
                found.append((f"{prefix}{one.name}.weight", dtype, one.shape))
                continue
            name, format = f"{prefix}{one.name}", exact if one.is_exact else layers
            if one.is_float32:
                format = formats(torch.float32, "none")[0]
            sizes = part_sizes(one.shape, format, gated=one.gated, has_bias=one.has_bias, kept=kept.get(name, ""))
            found += parts(name, sizes)
    found.append((NORM, norm_dtype, (config.hidden_size,)))
    return found
