"""llama.cpp's architectures that are read from GGUF: a row each, with Hugging Face's names of its facts and tensors.

What a row says is what llama.cpp's converter (conversion/*.py there) did to a Hugging Face model, and so what must be
undone. Facts that change a model's numbers and that its row does not read are refused by name. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.common.gguf_facts import (
    FOREIGN,
    FULL,
    KEY,
    NEXT,
    SHOWN_CHARS,
    SLIDING,
    VALUE,
    WINDOW,
    Config,
    Field,
    Rule,
    has_tensor,
    head_dim_of,
    is_set,
    needed,
    number,
    read_by_layer,
    read_field,
    read_layer_types,
    read_number,
    read_whole,
    whole,
)
from penstock.common.gguf_file import GgufFile
from penstock.common.gguf_rope import (
    deepseek2_rope,
    gemma4_rope,
    gpt_oss_rope,
    ministral3_rope,
    olmo3_rope,
    partial_rope,
    phi3_rope,
    qwen35_rope,
    rope_of_whole_heads,
    rope_parameters,
)

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

_FIELDS = {
    "context_length": needed("max_position_embeddings"),
    "embedding_length": needed("hidden_size"),
    "feed_forward_length": needed("intermediate_size"),
    "block_count": needed("num_hidden_layers"),
    "attention.head_count": needed("num_attention_heads"),
    "attention.head_count_kv": whole("num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": number("rms_norm_eps"),
    KEY: whole("head_dim"),
    "rope.freq_base": number("rope_theta"),
}
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


def nothing(file: GgufFile, config: Config) -> Config:
    """Add no field."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture: Hugging Face's class of it, its fields and its tensors' names."""

    model_type: str
    class_name: str
    # By facts after the architecture's name, beside or in place of those that all have; None: `rule` reads it.
    fields: Mapping[str, Field | None] = field(default_factory=dict)
    # Other facts that `rule` or `rope` reads, or that need no field.
    read: tuple[str, ...] = ()
    # Fields that llama.cpp has in its code.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule = nothing
    rope: Rule = rope_of_whole_heads
    # Hugging Face's names of modules of a layer and of others, beside or in place of those that all have; empty: the
    # architecture has no such module. A name with .weight or .bias is that of the tensor alone. `{}` stands for the
    # number of an expert.
    layer: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    # Number added to norms in the file, and names of norms without it.
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    # Rows of the query's and the key's heads have their two halves interleaved in the file.
    is_turned: bool = False
    # Other models under the same name: the first row for which a file meets the condition.
    variants: tuple[tuple[Callable[[GgufFile], bool], GgufArchitecture], ...] = ()

    def all_fields(self) -> dict[str, Field]:
        """Return the fields by their facts."""
        found = {**_FIELDS, **self.fields}
        return {fact: one for fact, one in found.items() if one is not None}

    def layer_names(self) -> dict[str, str]:
        """Return Hugging Face's names of a layer's modules by llama.cpp's."""
        return {ours: name for ours, name in {**_LAYER, **self.layer}.items() if name}

    def end_names(self) -> dict[str, str]:
        """Return Hugging Face's names of modules outside of layers by llama.cpp's."""
        return {ours: name for ours, name in {**_ENDS, **self.ends}.items() if name}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Return the row of a file. Raises StartupError naming an architecture that is not read."""
    name = file.architecture
    row = ARCHITECTURES.get(name)
    if row is None:
        raise file.error(
            f"has general.architecture {name[:SHOWN_CHARS]!r}, which is not read from GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}: give the model's safetensors"
        )
    return next((other for applies, other in row.variants if applies(file)), row)


def config_fields(file: GgufFile, row: GgufArchitecture) -> Config:
    """Return the fields of the model itself. Raises StartupError naming a missing or unsupported fact."""
    name, fields = file.architecture, row.all_fields()
    for fact, one in fields.items():
        if one.is_required and f"{name}.{fact}" not in file.facts:
            raise file.error(f"has no {name}.{fact}")
    values = {one.name: read_field(file, fact, one) for fact, one in fields.items()}
    for fact in FOREIGN:
        if fact not in fields and fact not in row.fields and fact not in row.read and is_set(file, fact):
            raise file.error(f"has {name}.{fact}, which is not read from GGUF: give the model's safetensors")
    if file.facts.get(f"{name}.attention.causal") is False:
        raise file.error(f"has {name}.attention.causal false: it is no decoder")
    if EMBEDDING not in file.tensors:
        raise file.error(f"has no tensor {EMBEDDING}")
    config: Config = {"model_type": row.model_type, "architectures": [row.class_name]}
    config |= row.fixed
    config |= {one: value for one, value in values.items() if value is not None}
    config["vocab_size"] = file.tensors[EMBEDDING].shape[0]
    config["tie_word_embeddings"] = HEAD not in file.tensors
    config |= row.rule(file, config)
    if VALUE not in row.read and (width := read_whole(file, VALUE, 0)) not in (0, head_dim_of(config)):
        raise file.error(f"has {name}.{VALUE} {width}: only the width of keys ({head_dim_of(config)}) is supported")
    return config | row.rope(file, config)


# Fields that take more than a fact.


def _llama(file: GgufFile, config: Config) -> Config:
    return {"attention_bias": has_tensor(file, "attn_q.bias"), "mlp_bias": has_tensor(file, "ffn_gate.bias")}


def _attention_bias(file: GgufFile, config: Config) -> Config:
    return {"attention_bias": has_tensor(file, "attn_q.bias")}


def _query_width(config: Config, layers: int) -> Config:
    """Return the width that scores are scaled by: of a head, and in the model of `layers` layers of the hidden size.
    llama.cpp recognises it so."""
    is_largest = config["num_hidden_layers"] == layers
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": width}


def _gemma2(file: GgufFile, config: Config) -> Config:
    return _query_width(config, 46)


def _gemma3(file: GgufFile, config: Config) -> Config:
    return {**_query_width(config, 62), "layer_types": read_layer_types(file, config, period=6)}


def _olmo3(file: GgufFile, config: Config) -> Config:
    return {"layer_types": read_layer_types(file, config, period=4), **_attention_bias(file, config)}


def _cohere(file: GgufFile, config: Config) -> Config:
    return {"use_qk_norm": has_tensor(file, "attn_q_norm.weight"), **_attention_bias(file, config)}


def _cohere2(file: GgufFile, config: Config) -> Config:
    return {"layer_types": read_layer_types(file, config, period=4)}


def _gemma4(file: GgufFile, config: Config) -> Config:
    types = read_layer_types(file, config, period=6)
    kv_heads = read_by_layer(file, "attention.head_count_kv", config)
    inner = read_by_layer(file, "feed_forward_length", config)
    full_heads, sliding_heads = (
        [heads for heads, one in zip(kv_heads, types, strict=True) if one == kind] or kv_heads
        for kind in (FULL, SLIDING)
    )
    layers = range(config["num_hidden_layers"])
    # Layers that share keys and values have none of their own.
    own = [f"blk.{layer}." for layer in layers if types[layer] == FULL and f"blk.{layer}.attn_k.weight" in file.tensors]
    per_layer = "per_layer_token_embd.weight"
    found: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "num_key_value_heads": sliding_heads[0],
        "num_global_key_value_heads": full_heads[0],
        "global_head_dim": read_whole(file, KEY, least=1),
        "head_dim": read_whole(file, f"{KEY}_swa", least=1),
        "intermediate_size": min(inner),
        "use_double_wide_mlp": max(inner) > min(inner),
        "attention_k_eq_v": any(f"{layer}attn_v.weight" not in file.tensors for layer in own),
        "hidden_size_per_layer_input": read_whole(file, "embedding_length_per_layer_input", 0),
        "enable_moe_block": has_tensor(file, "ffn_down_exps.weight"),
    }
    if per_layer in file.tensors:
        found["vocab_size_per_layer_input"] = file.tensors[per_layer].shape[0]
    return found


def _qwen35(file: GgufFile, config: Config) -> Config:
    values = read_whole(file, "ssm.time_step_rank", least=1)
    next_layers = read_whole(file, NEXT, 0)
    return {
        # The file counts the layers that guess further tokens.
        "num_hidden_layers": config["num_hidden_layers"] - next_layers,
        "full_attention_interval": read_whole(file, "full_attention_interval", 4, least=1),
        "linear_conv_kernel_dim": read_whole(file, "ssm.conv_kernel", least=1),
        "linear_key_head_dim": read_whole(file, "ssm.state_size", least=1),
        "linear_num_key_heads": read_whole(file, "ssm.group_count", least=1),
        "linear_num_value_heads": values,
        "linear_value_head_dim": read_whole(file, "ssm.inner_size", least=1) // values,
        **_attention_bias(file, config),
    }


def _lfm2(file: GgufFile, config: Config) -> Config:
    heads = read_by_layer(file, "attention.head_count_kv", config)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if one else "conv" for one in heads],
        "conv_L_cache": read_whole(file, "shortconv.l_cache", least=1),
        "conv_bias": has_tensor(file, "shortconv.in_proj.bias"),
    }


def _falcon_h1(file: GgufFile, config: Config) -> Config:
    inner, heads = read_whole(file, "ssm.inner_size", least=1), read_whole(file, "ssm.time_step_rank", least=1)
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": read_whole(file, "ssm.group_count", 1, least=1),
        "mamba_d_state": read_whole(file, "ssm.state_size", least=1),
        "mamba_d_conv": read_whole(file, "ssm.conv_kernel", least=1),
        "mamba_rms_norm": has_tensor(file, "ssm_norm.weight"),
        "mamba_conv_bias": has_tensor(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(file, "ssm_in.bias"),
        "projectors_bias": has_tensor(file, "ssm_out.bias"),
        "mlp_bias": has_tensor(file, "ffn_gate.bias"),
        **_attention_bias(file, config),
    }


def _deepseek2(file: GgufFile, config: Config) -> Config:
    turning = read_whole(file, "rope.dimension_count", least=1)
    # Older files have the widths of decompressed heads under the plain names.
    key = read_whole(file, f"{KEY}_mla", read_whole(file, KEY), least=turning + 1)
    value = read_whole(file, f"{VALUE}_mla", read_whole(file, VALUE), least=1)
    groups = read_whole(file, "expert_group_count", 0)
    return {
        # The file has 1: keys and values before they are decompressed.
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": turning,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "n_group": groups or 1,
        "topk_group": read_whole(file, "expert_group_used_count", 1, least=1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": file.flag(f"{file.architecture}.expert_weights_norm", default=False),
        "routed_scaling_factor": read_number(file, "expert_weights_scale", 1.0),
        "q_lora_rank": read_whole(file, "attention.q_lora_rank", 0) or None,
        **_attention_bias(file, config),
    }


def _is_yarn(file: GgufFile) -> bool:
    return file.text(f"{file.architecture}.rope.scaling.type", "none") == "yarn"


def _is_set_fact(fact: str) -> Callable[[GgufFile], bool]:
    return lambda file: is_set(file, fact)


def _gates_by_sigmoid(file: GgufFile) -> bool:
    return read_whole(file, "expert_gating_func", 1) == _SIGMOID


_SIGMOID = 2

# Tensors of several architectures.
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

# Of all experts in one tensor.
_STACKED = {
    "ffn_gate_exps.weight": "mlp.experts.gate",
    "ffn_up_exps.weight": "mlp.experts.up",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def _shared(module: str) -> dict[str, str]:
    """Return the names of the MLP that all rows share."""
    return {f"ffn_{one}_shexp": f"mlp.{module}.{one}_proj" for one in ("gate", "up", "down")}


_MIXTRAL = GgufArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    fields={"expert_count": needed("num_local_experts"), "expert_used_count": needed("num_experts_per_tok")},
    fixed={"sliding_window": None},
    layer={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    is_turned=True,
)
_QWEN2_MOE = GgufArchitecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fields={
        "expert_count": needed("num_experts"),
        "expert_used_count": needed("num_experts_per_tok"),
        "expert_feed_forward_length": needed("moe_intermediate_size"),
        "expert_shared_feed_forward_length": needed("shared_expert_intermediate_size"),
    },
    layer={**_EXPERTS, **_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
)
_GEMMA2 = GgufArchitecture(
    "gemma2",
    "Gemma2ForCausalLM",
    fields={
        WINDOW: needed("sliding_window"),
        KEY: needed("head_dim"),
        "attn_logit_softcapping": number("attn_logit_softcapping"),
        "final_logit_softcapping": number("final_logit_softcapping"),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    rule=_gemma2,
    layer=_GEMMA_NORMS,
    norm_offset=1.0,
)
_OLMO2 = GgufArchitecture(
    "olmo2",
    "Olmo2ForCausalLM",
    rule=_attention_bias,
    layer={**_NORMS_AFTER, "attn_norm": "", "ffn_norm": ""},
)
_COHERE = GgufArchitecture(
    "cohere",
    "CohereForCausalLM",
    fields={"attention.layer_norm_epsilon": number("layer_norm_eps"), "logit_scale": number("logit_scale")},
    rule=_cohere,
    layer={"ffn_norm": ""},
)
_QWEN35 = GgufArchitecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    fields={KEY: needed("head_dim")},
    read=(NEXT, "rope.dimension_sections", "ssm.state_size"),
    rule=_qwen35,
    rope=qwen35_rope,
    layer={
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "",
    },
    norm_offset=1.0,
    plain_norms=("linear_attn.norm",),
)
_DEEPSEEK_V2 = GgufArchitecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    fields={
        KEY: None,
        "attention.head_count_kv": None,
        "attention.kv_lora_rank": needed("kv_lora_rank"),
        "leading_dense_block_count": whole("first_k_dense_replace"),
        "expert_count": needed("n_routed_experts"),
        "expert_used_count": needed("num_experts_per_tok"),
        "expert_feed_forward_length": needed("moe_intermediate_size"),
        "expert_shared_count": needed("n_shared_experts"),
    },
    read=(
        "expert_group_count",
        "expert_weights_scale",
        "expert_gating_func",
        "rope.scaling.yarn_log_multiplier",
        VALUE,
    ),
    fixed={"first_k_dense_replace": 0},
    rule=_deepseek2,
    rope=deepseek2_rope,
    layer={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b",
        "attn_v_b": "self_attn.v_b",
        "ffn_gate_inp": "mlp.gate",
        **_STACKED,
        **_shared("shared_experts"),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
)
_LLAMA = GgufArchitecture(
    "llama",
    "LlamaForCausalLM",
    rule=_llama,
    is_turned=True,
    variants=((_is_set_fact("expert_count"), _MIXTRAL),),
)
_MINISTRAL3 = GgufArchitecture(
    "ministral3",
    "Ministral3ForCausalLM",
    read=("rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
    rope=ministral3_rope,
    is_turned=True,
)

# By llama.cpp's names.
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": _LLAMA,
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        fields={
            WINDOW: needed("sliding_window"),
            KEY: needed("head_dim"),
            "rope.freq_base_swa": number("rope_local_base_freq"),
            "final_logit_softcapping": number("final_logit_softcapping"),
        },
        rule=_gemma3,
    ),
    "gemma4": GgufArchitecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        fields={
            WINDOW: needed("sliding_window"),
            KEY: None,
            "attention.head_count_kv": None,
            "feed_forward_length": None,
            "attention.shared_kv_layers": whole("num_kv_shared_layers"),
            "final_logit_softcapping": number("final_logit_softcapping"),
            "expert_count": whole("num_experts"),
            "expert_used_count": whole("top_k_experts"),
            "expert_feed_forward_length": whole("moe_intermediate_size"),
        },
        read=("rope.freq_base_swa", VALUE),
        rule=_gemma4,
        rope=gemma4_rope,
        ends={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        layer={
            **_GEMMA_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
    ),
    "phi3": GgufArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        fields={WINDOW: whole("sliding_window")},
        fixed={"sliding_window": None},
        rope=phi3_rope,
        layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "qwen2moe": _QWEN2_MOE,
    "qwen3moe": replace(
        _QWEN2_MOE,
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        fields={fact: one for fact, one in _QWEN2_MOE.fields.items() if "shared" not in fact},
        fixed={"norm_topk_prob": True},
        layer=_EXPERTS,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        fields={
            WINDOW: needed("sliding_window"),
            "expert_count": needed("num_local_experts"),
            "expert_used_count": needed("num_experts_per_tok"),
            "expert_feed_forward_length": needed("intermediate_size"),
            "feed_forward_length": None,
        },
        fixed={"attention_bias": True},
        rope=gpt_oss_rope,
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate",
            "ffn_up_exps": "mlp.experts.up",
            "ffn_down_exps": "mlp.experts.down",
        },
    ),
    "mistral3": GgufArchitecture(
        "mistral",
        "MistralForCausalLM",
        fixed={"sliding_window": None},
        is_turned=True,
        variants=((_is_yarn, _MINISTRAL3),),
    ),
    "glm4": GgufArchitecture(
        "glm4",
        "Glm4ForCausalLM",
        rule=_attention_bias,
        rope=partial_rope,
        layer={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "granite": replace(
        _LLAMA,
        model_type="granite",
        class_name="GraniteForCausalLM",
        fields={
            "attention.scale": number("attention_multiplier"),
            "embedding_scale": number("embedding_multiplier"),
            "residual_scale": number("residual_multiplier"),
            "logit_scale": number("logits_scaling"),
        },
        variants=(),
    ),
    "olmo2": replace(
        _OLMO2,
        variants=(
            (
                _is_set_fact(WINDOW),
                replace(
                    _OLMO2,
                    model_type="olmo3",
                    class_name="Olmo3ForCausalLM",
                    fields={WINDOW: needed("sliding_window")},
                    read=("rope.freq_base_swa",),
                    rule=_olmo3,
                    rope=olmo3_rope,
                ),
            ),
        ),
    ),
    "command-r": _COHERE,
    "cohere2": replace(
        _COHERE,
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        fields={**_COHERE.fields, WINDOW: needed("sliding_window")},
        rule=_cohere2,
    ),
    "smollm3": replace(
        _LLAMA,
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        # Every fourth layer has no rotary embedding.
        fixed={"no_rope_layer_interval": 4},
        variants=(),
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        fields={
            **_QWEN35.fields,
            "feed_forward_length": None,
            "expert_count": needed("num_experts"),
            "expert_used_count": needed("num_experts_per_tok"),
            "expert_feed_forward_length": needed("moe_intermediate_size"),
            "expert_shared_feed_forward_length": needed("shared_expert_intermediate_size"),
        },
        layer={
            **_QWEN35.layer,
            **_shared("shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **_STACKED,
        },
    ),
    "falcon-h1": GgufArchitecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        read=("ssm.state_size",),
        # The multipliers are in the weights; the norm comes behind the gate in llama.cpp.
        fixed={"mamba_norm_before_gate": False},
        rule=_falcon_h1,
        rope=rope_parameters,
        ends={"output_norm": "model.final_layernorm"},
        layer={
            # Of that name alone in files of today.
            "ffn_norm": "pre_ff_layernorm.weight",
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
    ),
    "lfm2": GgufArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        fields={"attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": number("norm_eps")},
        fixed={"block_auto_adjust_ff_dim": False},
        rule=_lfm2,
        rope=rope_parameters,
        ends={"token_embd_norm": "model.embedding_norm", "output_norm": ""},
        layer={
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "deepseek2": replace(
        _DEEPSEEK_V2,
        variants=(
            (
                _gates_by_sigmoid,
                replace(_DEEPSEEK_V2, model_type="deepseek_v3", class_name="DeepseekV3ForCausalLM"),
            ),
        ),
    ),
}
