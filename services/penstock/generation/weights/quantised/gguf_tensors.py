"""The tensors of a GGUF file by Hugging Face's names: renamed, experts apart, and those that are made of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.common.gguf_architectures import GgufArchitecture
from penstock.common.gguf_file import GgufFile, GgufTensor
from penstock.common.gguf_rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

# Read with the configuration.
_NOT_WEIGHTS = frozenset((ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS))
_NAME = re.compile(r"(?:blk\.([0-9]{1,6})\.)?([\w.]+?)(?:\.(weight|bias|scale))?")
# More than any model has: a header may claim any number, and each gets a name.
_MOST_EXPERTS = 1024
# Matrices of one row, which llama.cpp's tools write as vectors.
_ONE_ROW = "mlp.shared_expert_gate.weight"
_SHOWN, _SHOWN_CHARS = 5, 80


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor of a layer that is made of others of the layer, in float32."""

    name: str
    sources: tuple[str, ...]
    make: Callable[[Sequence[Tensor], GgufFile], Tensor]
    # The same of the rows (outputs, bytes) of one of a tensor's matrices; None: rows do not stay whole.
    rows: Callable[[Sequence[Tensor]], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a recipe makes of these tensors of the model."""

    sources: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Names:
    """All tensors of a model: those that are read as they are, and those that are made, with the sources' places."""

    stored: dict[str, GgufTensor]
    made: dict[str, Made]
    sources: dict[str, GgufTensor]


def named_tensors(file: GgufFile, row: GgufArchitecture) -> Names:
    """Name the tensors of a file. Raises StartupError naming some that no model of the architecture has."""
    layer_names, ends = row.layer_names(), row.end_names()
    stored: dict[str, GgufTensor] = {}
    unknown = []
    for found, tensor in file.tensors.items():
        name = _hf_name(found, layer_names, ends)
        if name is not None:
            stored.update(_expert_tensors(file, name, tensor))
        elif found not in _NOT_WEIGHTS and not _is_of_next_tokens(file, found):
            unknown.append(found)
    if unknown:
        raise file.error(f"has unexpected tensors {', '.join(name[:_SHOWN_CHARS] for name in unknown[:_SHOWN])}")
    made = dict(_made(stored, RECIPES.get(row.model_type, ())))
    sources = {one: stored[one] for found in made.values() for one in found.sources}
    return Names({name: tensor for name, tensor in stored.items() if name not in sources}, made, sources)


def _hf_name(name: str, layer_names: Mapping[str, str], ends: Mapping[str, str]) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    known = ends if layer is None else layer_names
    found = known.get(f"{module}.{kind}")
    if found is None and (found := known.get(module)) is not None and kind is not None:
        found = f"{found}.{kind}"
    return found if found is None or layer is None else f"model.layers.{int(layer)}.{found}"


def _is_of_next_tokens(file: GgufFile, name: str) -> bool:
    """True for a tensor of the layers behind the model's own, which guess further tokens."""
    count = file.whole(f"{file.architecture}.nextn_predict_layers", 0) or 0
    layers = file.whole(f"{file.architecture}.block_count", 0) or 0
    match = _NAME.fullmatch(name)
    return bool(count) and match is not None and match[1] is not None and int(match[1]) >= layers - count


def _expert_tensors(file: GgufFile, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensor by its name, or those of all experts: each is a part of its bytes."""
    if name.endswith(_ONE_ROW) and len(tensor.shape) == 1:
        yield name, replace(tensor, shape=(1, *tensor.shape))
        return
    if "{}" not in name:
        yield name, tensor
        return
    count = tensor.shape[0]
    if len(tensor.shape) != 3 or not 0 < count <= _MOST_EXPERTS:
        raise file.error(f"has {name.format('N')} of shape {list(tensor.shape)}: expected are up to 1024 matrices")
    size = (tensor.end - tensor.begin) // count
    for expert in range(count):
        begin = tensor.begin + expert * size
        yield name.format(expert), replace(tensor, shape=tensor.shape[1:], begin=begin, end=begin + size)


def _made(stored: Mapping[str, GgufTensor], recipes: Sequence[Recipe]) -> Iterator[tuple[str, Made]]:
    if not recipes:
        return
    layers = dict.fromkeys(name.split(".", 3)[2] for name in stored if name.startswith("model.layers."))
    for layer in layers:
        for recipe in recipes:
            sources = tuple(f"model.layers.{layer}.{one}" for one in recipe.sources)
            if all(one in stored for one in sources):
                yield f"model.layers.{layer}.{recipe.name}", Made(sources, recipe)


# What the recipes do: the converter's steps, undone.


def _own(name: str, make: Callable[[Sequence[Tensor], GgufFile], Tensor]) -> Recipe:
    """Return a recipe that changes a tensor in its place."""
    return Recipe(name, (name,), make)


def _flat(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return found[0].flatten()


def _log_of_negated(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return torch.log(-found[0].flatten())


def _kernel(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    """Return (channels, 1, width) of a convolution of each channel alone."""
    return found[0].unsqueeze(1)


def _stacked_gate_up(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return torch.cat(tuple(found), dim=1)


def _transposed(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return found[0].transpose(1, 2)


def _interleaved(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    """Return (experts, inputs, outputs), gates and values in turns."""
    return torch.stack(tuple(found), dim=2).flatten(1, 2).transpose(1, 2)


def _interleaved_rows(found: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(found), dim=1).flatten(0, 1)


def _first(found: Sequence[Tensor]) -> Tensor:
    return found[0]


def _interleaved_bias(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return torch.stack(tuple(found), dim=2).flatten(1)


def _keys_and_values(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    """Return the rows of each head, its keys before its values. The file has keys (heads, rank, width) and values
    (heads, width, rank)."""
    keys, values = found
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _grouped(value: Tensor, file: GgufFile, *, of_head: bool) -> Tensor:
    """Return rows in the order of key heads, with all values of a key head together: in the file the first value of
    every key head comes first. `of_head`: there are rows for each dim of a head, else one for each head."""
    name = file.architecture
    keys = file.whole(f"{name}.ssm.group_count", 1, least=1) or 1
    heads = file.whole(f"{name}.ssm.time_step_rank", 1, least=1) or 1
    width = (file.whole(f"{name}.ssm.inner_size", 1, least=1) or 1) // heads if of_head else 1
    if heads % keys or value.shape[0] != heads * width:
        raise file.error(f"has {heads} value heads of width {width} for {keys} key heads, and {value.shape[0]} rows")
    rows = value.reshape(heads // keys, keys, width, *value.shape[1:])
    return rows.transpose(0, 1).flatten(0, 2)


def _grouped_heads(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return _grouped(found[0], file, of_head=False)


def _grouped_rows(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return _grouped(found[0], file, of_head=True)


def _grouped_values(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    """Order the values' rows, which are behind those of queries and keys."""
    value = found[0]
    first = value.shape[0] - (file.whole(f"{file.architecture}.ssm.inner_size", 1) or 1)
    return torch.cat((value[:first], _grouped(value[first:], file, of_head=True)))


def _grouped_kernel(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return _grouped_values(found, file).unsqueeze(1)


def _grouped_inputs(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return _grouped(found[0].t(), file, of_head=True).t()


def _grouped_decay(found: Sequence[Tensor], file: GgufFile) -> Tensor:
    return torch.log(-_grouped(found[0].flatten(), file, of_head=False))


_STACKED = Recipe("mlp.experts.gate_up_proj", ("mlp.experts.gate", "mlp.experts.up"), _stacked_gate_up)
_QWEN35 = (
    _own("linear_attn.A_log", _grouped_decay),
    _own("linear_attn.dt_bias", _grouped_heads),
    _own("linear_attn.in_proj_a.weight", _grouped_heads),
    _own("linear_attn.in_proj_b.weight", _grouped_heads),
    _own("linear_attn.in_proj_z.weight", _grouped_rows),
    _own("linear_attn.in_proj_qkv.weight", _grouped_values),
    _own("linear_attn.conv1d.weight", _grouped_kernel),
    _own("linear_attn.out_proj.weight", _grouped_inputs),
)
_DEEPSEEK = (
    _STACKED,
    Recipe("self_attn.kv_b_proj.weight", ("self_attn.k_b.weight", "self_attn.v_b.weight"), _keys_and_values),
)
# By Hugging Face's model types.
RECIPES: dict[str, tuple[Recipe, ...]] = {
    "gpt_oss": (
        Recipe(
            "mlp.experts.gate_up_proj",
            ("mlp.experts.gate.weight", "mlp.experts.up.weight"),
            _interleaved,
            _interleaved_rows,
        ),
        Recipe("mlp.experts.gate_up_proj_bias", ("mlp.experts.gate.bias", "mlp.experts.up.bias"), _interleaved_bias),
        Recipe("mlp.experts.down_proj", ("mlp.experts.down.weight",), _transposed, _first),
        Recipe("mlp.experts.down_proj_bias", ("mlp.experts.down.bias",), lambda found, file: found[0]),
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": (*_QWEN35, _STACKED),
    "lfm2": (_own("conv.conv.weight", _kernel),),
    "falcon_h1": (
        _own("mamba.A_log", _log_of_negated),
        _own("mamba.D", _flat),
        _own("mamba.norm.weight", _flat),
        _own("mamba.conv1d.weight", _kernel),
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
