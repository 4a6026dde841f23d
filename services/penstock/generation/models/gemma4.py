"""Gemma 4 (text): layers that read everything have heads of another size than those with a window, later layers read
the keys and values of earlier ones, and every layer adds a vector of the token to the stream."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.generation.core.layer_shapes import LayerInputs, LayerShape
from penstock.generation.core.model_config import ConfigReader, ModelConfig, NormKind, RopeConfig
from penstock.generation.layers.rope import read_rope_parameters
from penstock.generation.models.family import FULL, SLIDING, Family, from_field, read_layer_types
from penstock.generation.models.gemma import NORMS, read_cap

# Rotary embedding of layers that read everything, where config.json has none: a part of a head turns.
_DEFAULT_THETA, _DEFAULT_SHARE = 1e6, 0.25
_PERIOD = 6
# Fields of a layer that `per_layer_config` may have.
_OWN_FIELDS = {"head_dim", "num_key_value_heads"}


def _types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    found = read_layer_types(config, num_layers)
    types = found or tuple(SLIDING if (layer + 1) % _PERIOD else FULL for layer in range(num_layers))
    return (*types[:-1], FULL)


def _windows(config: ConfigReader, num_layers: int, default: int = 512) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", default)
    return tuple(window if one == SLIDING else None for one in _types(config, num_layers))


def _unified_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    return _windows(config, num_layers, 1024)


def _rope(config: ConfigReader, max_positions: int, kind: str, head_dim: int) -> RopeConfig:
    """Read the rotary embedding of one kind of layers."""
    by_kind = config.mapping("rope_parameters")
    if by_kind is None:
        if kind == SLIDING:
            return RopeConfig("default", 10_000.0)
        return _proportional(config, head_dim, _DEFAULT_SHARE, RopeConfig("proportional", _DEFAULT_THETA))
    own = by_kind.mapping(kind)
    if own is None:
        raise by_kind.unsupported(kind, "is missing")
    theta = own.number("rope_theta")
    if own.text("rope_type", "default") != "proportional":
        return read_rope_parameters(config, own, max_positions, theta)
    rope = RopeConfig("proportional", theta, factor=own.number("factor", 1.0))
    return _proportional(own, head_dim, own.number("partial_rotary_factor", 1.0), rope)


def _proportional(config: ConfigReader, head_dim: int, share: float, rope: RopeConfig) -> RopeConfig:
    """Return `rope` for a head with a share of dims that turn, at the frequencies that they have in a whole head."""
    turning = int(share * head_dim // 2)
    if not 0 < turning <= head_dim // 2:
        raise config.unsupported("partial_rotary_factor", f"({share}) leaves no dims of {head_dim} to turn")
    return replace(rope, rotary_dim=0 if 2 * turning == head_dim else 2 * turning)


def _sliding_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    return _rope(config, max_positions, SLIDING, head_dim)


def _shapes(config: ConfigReader, model: ModelConfig, types: tuple[str, ...]) -> tuple[LayerShape, ...]:
    shared = config.integer("num_kv_shared_layers", 0, minimum=0)
    first = model.num_layers - shared
    k_eq_v, doubles = config.boolean("attention_k_eq_v", False), config.boolean("use_double_wide_mlp", False)
    own = _own_sizes(config, model, types, k_eq_v=k_eq_v)
    found = []
    for layer, (kind, (kv_heads, head_dim)) in enumerate(zip(types, own, strict=True)):
        source = None
        if layer >= first:
            source = next((other for other in range(first - 1, -1, -1) if types[other] == kind), None)
            if source is None or own[source] != (kv_heads, head_dim):
                raise config.unsupported("num_kv_shared_layers", f"({shared}) leaves {kind} nothing to read")
        inner = model.intermediate_size * (2 if doubles and source is not None else 1)
        found.append(LayerShape(kv_heads, head_dim, inner, source, k_eq_v and kind == FULL))
    return tuple(found)


def _own_sizes(
    config: ConfigReader, model: ModelConfig, types: tuple[str, ...], *, k_eq_v: bool
) -> list[tuple[int, int]]:
    """Return the number of key/value heads, and the dims of a head, of each layer."""
    sizes = [(model.num_kv_heads, model.head_dim)] * model.num_layers
    by_layer = config.mapping("per_layer_config")
    if by_layer is None:
        heads = config.optional_integer("num_global_key_value_heads", minimum=1) if k_eq_v else None
        full = (heads or model.num_kv_heads, config.integer("global_head_dim", 512))
        sizes = [full if kind == FULL else own for kind, own in zip(types, sizes, strict=True)]
    else:
        for name in by_layer.values:
            own = by_layer.mapping(name)
            if not name.isdecimal() or int(name) >= model.num_layers:
                raise by_layer.unsupported(name, "is not the number of a layer")
            if own is None:
                continue
            if other := sorted(own.values.keys() - _OWN_FIELDS):
                raise own.unsupported(other[0], "is not supported")
            heads, dim = sizes[int(name)]
            sizes[int(name)] = own.integer("num_key_value_heads", heads), own.integer("head_dim", dim)
    for heads, dim in set(sizes):
        if model.num_heads % heads:
            raise config.unsupported("num_attention_heads", f"({model.num_heads}) is not a multiple of {heads}")
        if dim % 2:
            raise config.unsupported("global_head_dim", f"({dim}) must be even: rotary embedding turns pairs")
    return sizes


def _inputs(config: ConfigReader) -> LayerInputs | None:
    dim = config.integer("hidden_size_per_layer_input", 256, minimum=0) if _has_inputs(config) else 0
    return LayerInputs(dim, config.integer("vocab_size_per_layer_input", 262_144)) if dim else None


def _has_inputs(config: ConfigReader) -> bool:
    """True unless the field is null: the class of such a model has its default."""
    return "hidden_size_per_layer_input" not in config.values or config.has("hidden_size_per_layer_input")


def _finish(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise config.unsupported("use_bidirectional_attention", "is not supported: rows see only earlier positions")
    if config.boolean("enable_moe_block", False):
        raise config.unsupported("enable_moe_block", "is not supported: its layers have an MLP beside experts")
    types = _types(config, model.num_layers)
    shapes = _shapes(config, model, types)
    ropes = tuple(
        _rope(config, model.max_position_embeddings, kind, shape.head_dim)
        for kind, shape in zip(types, shapes, strict=True)
    )
    widest = max((shape for shape in shapes if shape.source is None), key=lambda shape: shape.kv_width)
    return replace(
        model,
        num_kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        layer_shapes=shapes,
        layer_ropes=ropes,
        norms=NORMS,
        norm_kind=NormKind.RMS_ROUNDED_ONCE,
        norms_values=True,
        has_layer_scalars=True,
        layer_inputs=_inputs(config),
        embedding_scale=math.sqrt(model.hidden_size),
        attention_scale=1.0,
        logit_softcap=read_cap(config, "final_logit_softcapping", 0.0),
    )


GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    qk_norm=True,
    sliding_windows=_windows,
    rope=_sliding_rope,
    activation_field="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_head_dim=256,
    default_tied=True,
    default_bos=2,
    default_eos=(1,),
    finish=_finish,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
)


def _finish_unified(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(_finish(config, model), layer_inputs=None)


GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    sliding_windows=_unified_windows,
    finish=_finish_unified,
    defaults={**GEMMA4.defaults, "max_position_embeddings": 262_144},
)
