"""Families with multi-head latent attention: DeepSeek V2 and V3, and what shares their attention (Kimi K2,
GLM-4.7-Flash, Youtu, Sarvam, MiniCPM3); with sparse attention in models.sparse_families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.generation.core.latent_heads import LatentHeads
from penstock.generation.core.model_config import MAX_LAYERS, ConfigReader, Experts, ModelConfig, RopeConfig, Routing
from penstock.generation.layers.rope import read_rope
from penstock.generation.models.dense_families import read_longrope
from penstock.generation.models.family import Family, from_field
from penstock.generation.models.mixtures import MOST_EXPERTS
from penstock.generation.weights.quantised.table import Gguf

# Kinds of layers in `mlp_layer_types`.
_DENSE, _SPARSE = "dense", "sparse"
# Widths that config.json may leave out: the same in all published models but GLM's and MiniCPM's.
LATENT_WIDTHS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _latent(config: ConfigReader, model: ModelConfig, widths: Mapping[str, int], *, interleaved: bool) -> ModelConfig:
    """Return the model with its latent heads. The row of a token is the pool's one key/value head."""
    _refuse_gguf(config)
    turned = config.integer("qk_rope_head_dim", widths["qk_rope_head_dim"])
    if turned % 2:
        raise config.unsupported("qk_rope_head_dim", f"({turned}) must be even: rotary embedding turns pairs")
    if model.num_kv_heads != model.num_heads:
        raise config.unsupported("num_key_value_heads", "must be num_attention_heads: heads share one latent")
    # Null means that there is one product; absent, the class's default.
    has_rank = config.values.get("q_lora_rank", widths["q_lora_rank"] or None) is not None
    latent = LatentHeads(
        rank=config.integer("kv_lora_rank", widths["kv_lora_rank"]),
        plain_dim=config.integer("qk_nope_head_dim", widths["qk_nope_head_dim"]),
        turned_dim=turned,
        value_dim=config.integer("v_head_dim", widths.get("v_head_dim", model.hidden_size // model.num_heads)),
        query_rank=config.integer("q_lora_rank", widths["q_lora_rank"]) if has_rank else 0,
    )
    return replace(
        model,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.row_dim,
        attention_scale=latent.query_dim**-0.5 * _magnitude(config) ** 2,
        rope=replace(model.rope, is_interleaved=interleaved),
    )


def _refuse_gguf(config: ConfigReader) -> None:
    """Refuse a GGUF file: its tensors have the names of transformers' modules."""
    quantised = config.mapping("quantization_config")
    if quantised is not None and quantised.values.get("quant_method") == Gguf.method:
        raise config.unsupported("quantization_config", f"of {Gguf.method} is not read for compressed keys and values")


def _magnitude(config: ConfigReader) -> float:
    """Return yarn's factor on queries and keys alike, which DeepSeek applies to the scores."""
    scaling = config.mapping("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    if scaling is None or scaling.text("rope_type", scaling.text("type", "default")) == "default":
        return 1.0
    if not scaling.values.get("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    return 1.0 if factor <= 1 else 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0


def _rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    return read_rope(config, max_positions)


def _layers_of_experts(config: ConfigReader, num_layers: int, first: int) -> tuple[bool, ...]:
    """Tell which layers have experts: by `mlp_layer_types`, else from `first_k_dense_replace` on."""
    types = config.values.get("mlp_layer_types")
    if types is None:
        first = config.integer("first_k_dense_replace", first, minimum=0)
        return tuple(layer >= first for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {_DENSE, _SPARSE}:
        raise config.error("mlp_layer_types", f"must list {_DENSE!r} or {_SPARSE!r} for each of {num_layers} layers")
    return tuple(one == _SPARSE for one in types)


def _experts(config: ConfigReader, num_layers: int, fields: Mapping[str, int], routing: Routing) -> Experts:
    """Return the experts; `fields` are the class's defaults."""
    count = config.integer("n_routed_experts", fields["n_routed_experts"], maximum=MOST_EXPERTS)
    per_row = config.integer("num_experts_per_tok", fields.get("num_experts_per_tok"))
    inner = config.integer("moe_intermediate_size", fields["moe_intermediate_size"])
    size, rest = divmod(count, routing.num_groups)
    if rest:
        raise config.error("n_group", f"({routing.num_groups}) does not divide n_routed_experts ({count})")
    if routing.groups_of_row > routing.num_groups or per_row > size * routing.groups_of_row:
        raise config.error(
            "num_experts_per_tok",
            f"({per_row}) is more than {routing.groups_of_row} of {routing.num_groups} groups have",
        )
    return Experts(
        count,
        per_row,
        inner,
        sums_to_one=routing.is_sigmoid and config.boolean("norm_topk_prob", True),
        layers=_layers_of_experts(config, num_layers, fields["first_k_dense_replace"]),
        shared_inner=inner * config.integer("n_shared_experts", fields["n_shared_experts"], minimum=0),
        shared="shared_experts",
        shared_is_gated=False,
        routing=replace(routing, ranked_by=min(routing.ranked_by, size)),
    )


def _groups(config: ConfigReader, fields: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of groups of experts, and that of the groups that a row has experts of."""
    return config.integer("n_group", fields["n_group"]), config.integer("topk_group", fields["topk_group"])


def _finish_v2(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    model = _latent(config, model, LATENT_WIDTHS, interleaved=True)
    groups, of_row = 1, 1
    method = config.text("topk_method", "greedy")
    if method == "group_limited_greedy":
        groups, of_row = config.integer("n_group"), config.integer("topk_group")
    elif method != "greedy":
        raise config.unsupported("topk_method", f"{method!r} is not supported; greedy and group_limited_greedy are")
    routing = Routing(num_groups=groups, groups_of_row=of_row, scale=config.number("routed_scaling_factor", 1.0))
    experts = _experts(config, model.num_layers, _V2_EXPERTS, routing)
    if model.mlp_bias and any(experts.layers):
        raise config.unsupported("mlp_bias", "with experts, which have none, is not supported")
    return replace(model, experts=experts)


_V2_EXPERTS = {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    mlp_bias=from_field("mlp_bias"),
    rope=_rope,
    finish=_finish_v2,
    default_head_dim=64,
    default_bos=1,
    default_eos=(2,),
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
)


def finish_v3(
    config: ConfigReader, model: ModelConfig, *, widths: Mapping[str, int], fields: Mapping[str, int], scale: float
) -> ModelConfig:
    model = _latent(config, model, widths, interleaved=config.boolean("rope_interleave", True))
    groups, of_row = _groups(config, fields)
    routing = Routing(
        is_sigmoid=True,
        has_bias=True,
        in_float32=True,
        num_groups=groups,
        groups_of_row=of_row,
        ranked_by=2,
        scale=config.number("routed_scaling_factor", scale),
    )
    drafts = config.integer("num_nextn_predict_layers", 1, minimum=0, maximum=MAX_LAYERS)
    return replace(model, experts=_experts(config, model.num_layers, fields, routing), num_draft_layers=drafts)


V3_EXPERTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
}


def like_v3(
    model_type: str,
    architecture: str,
    defaults: Mapping[str, int],
    *,
    fields: Mapping[str, int] = V3_EXPERTS,
    widths: Mapping[str, int] = LATENT_WIDTHS,
    scale: float = 2.5,
    eps: float = 1e-6,
) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        qkv_bias=from_field("attention_bias"),
        output_bias=from_field("attention_bias"),
        rope=_rope,
        finish=partial(finish_v3, widths=widths, fields=fields, scale=scale),
        default_head_dim=64,
        default_bos=0,
        default_eos=(1,),
        default_eps=eps,
        defaults=defaults,
    )


_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
}
# V3, V3.1 and R1.
DEEPSEEK_V3 = like_v3("deepseek_v3", "DeepseekV3ForCausalLM", _V3)
# Published with DeepSeek's own code, which these modules are; its config.json names every field.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
SARVAM_MLA = like_v3(
    "sarvam_mla",
    "SarvamMLAForCausalLM",
    {
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "max_position_embeddings": 4096,
    },
    fields={**V3_EXPERTS, "n_routed_experts": 128, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    widths={**LATENT_WIDTHS, "q_lora_rank": 0},
)
GLM4_MOE_LITE = like_v3(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
    },
    fields={
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    widths={**LATENT_WIDTHS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
    scale=1.8,
    eps=1e-5,
)


def _finish_youtu(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return _latent(config, model, LATENT_WIDTHS, interleaved=config.boolean("rope_interleave", True))


YOUTU = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    rope=_rope,
    finish=_finish_youtu,
    default_head_dim=64,
    default_bos=128000,
    default_eos=(128001,),
    default_tied=True,
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
    },
)


def _minicpm_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    """Read the rotary embedding, longrope in the published model: the same frequencies for all lengths."""
    scaling = config.mapping("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    if scaling is None or scaling.text("rope_type", scaling.text("type", "default")) != "longrope":
        return read_rope(config, max_positions)
    turned = config.integer("qk_rope_head_dim", _MINICPM_WIDTHS["qk_rope_head_dim"])
    rope = read_longrope(config, scaling, max_positions, turned)
    if rope.original_max_position_embeddings < max_positions and scaling.numbers("long_factor") != rope.divisors:
        raise scaling.unsupported("long_factor", "other than short_factor is not supported")
    return rope


def _finish_minicpm3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    model = _latent(config, model, _MINICPM_WIDTHS, interleaved=False)
    residual, logits = 1.0, 1.0
    # Null means no scale; absent, the class's default.
    if config.values.get("scale_depth", 1.4) is not None:
        residual = config.number("scale_depth", 1.4) / math.sqrt(model.num_layers)
    if config.values.get("dim_model_base", 256) is not None:
        logits = config.integer("dim_model_base", 256) / model.hidden_size
    return replace(
        model,
        embedding_scale=config.number("scale_emb", 12.0),
        residual_scale=residual,
        logit_scale=logits,
    )


_MINICPM_WIDTHS = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MINICPM3 = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    mlp_bias=from_field("mlp_bias"),
    rope=_minicpm_rope,
    finish=_finish_minicpm3,
    default_head_dim=32,
    default_bos=1,
    default_eos=(2,),
    default_eps=1e-5,
    default_tied=True,
    defaults={
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 32768,
    },
)
