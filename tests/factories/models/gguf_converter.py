"""A checkpoint as a GGUF file, as llama.cpp's convert_hf_to_gguf.py makes it, by its own package's names and layout.

Written apart from the reader: each architecture's function does what its file in llama.cpp's `conversion/` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Config = dict[str, Any]
Named = Iterator[tuple[str, Tensor]]


def convert(
    folder: Path,
    path: Path,
    architecture: str,
    *,
    quantised: bool = True,
    matrices: str = "Q8_0",
    experts: str = "F32",
    parts: int = 1,
    changes: Config | None = None,
    vocabulary: Config | None = None,
) -> Path:
    """Write `folder`'s model to `path`, or in parts beside it, and return the first file.

    Matrices are of type `matrices` where `quantised` and their rows are whole blocks: `round_weights` makes a
    checkpoint of the same numbers for Q8_0. `experts`: type of tensors with all experts. `changes`: facts in place of
    others, None to leave one out. `vocabulary`: facts of the tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0 if parts == 1 else _tensors_of(folder, parts))
    names = gguf.get_tensor_name_map(_kind(architecture), _layers(config))
    _facts(writer, config)
    _OWN_FACTS.get(architecture, _no_facts)(writer, config)
    tensors = {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    for one in changes or {}:
        for part in writer.kv_data:
            part.pop(f"{architecture}.{one}", None)
    for one, value in (changes or {}).items():
        if value is not None:
            writer.add_key_value(f"{architecture}.{one}", value, gguf.GGUFValueType.get_type(value))
    for one, value in (vocabulary or {}).items():
        writer.add_key_value(one, value, _kind_of(value))
    for name, value in _steps(architecture, config, tensors):
        kind = matrices if quantised and _fits(name, value) else "F32"
        kind = experts if value.dim() == 3 and ".experts." in name else kind
        _add(writer, names, name, value.float(), gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def round_weights(folder: Path) -> None:
    """Change the checkpoint's matrices to numbers that Q8_0 holds."""
    from safetensors.torch import save_file

    for file in folder.glob("*.safetensors"):
        found = {name: _rounded(value) if _fits(name, value) else value for name, value in load_file(file).items()}
        save_file(found, file, metadata={"format": "pt"})


def _kind_of(value: Any) -> Any:
    """Return the type of a fact. Numbers are unsigned: llama.cpp reads no others for sizes and ids."""
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value)


def _fits(name: str, value: Tensor) -> bool:
    # Biases of experts are matrices, too.
    return value.dim() == 2 and value.shape[1] % 32 == 0 and not name.endswith("bias")


def _rounded(value: Tensor) -> Tensor:
    blocks = gguf.quantize(value.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)).to(value.dtype)


def _kind(architecture: str) -> Any:
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _layers(config: Config) -> int:
    return int(config["num_hidden_layers"])


def _tensors_of(folder: Path, parts: int) -> int:
    count = sum(len(load_file(file)) for file in folder.glob("*.safetensors"))
    return math.ceil(count / parts)


def _add(writer: Any, names: Any, name: str, value: Tensor, kind: Any) -> None:
    """Add a tensor by Hugging Face's name, or by llama.cpp's own."""
    found = (
        name if name.startswith("blk.") or name in _OWN_NAMES else names.get_name(name, (".weight", ".bias", ".scale"))
    )
    if found is None:
        raise KeyError(name)
    data = value.contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(found, data.astype(np.float32))
    else:
        writer.add_tensor(found, gguf.quantize(data, kind), raw_dtype=kind)


_OWN_NAMES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _facts(writer: Any, config: Config) -> None:
    """Add what TextModel.set_gguf_parameters adds for every architecture."""
    writer.add_block_count(_layers(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size") is not None:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config.get("num_key_value_heads") is not None:
        writer.add_head_count_kv(config["num_key_value_heads"])
    rope: Config = config.get("rope_parameters") or {}
    full: Config = rope.get("full_attention", rope)
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        for one, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if full.get(one) is not None:
                add(full[one])
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_theta") is not None:
        writer.add_rope_freq_base(full["rope_theta"])
    if (local := rope.get("sliding_attention", {}).get("rope_theta")) is not None:
        writer.add_rope_freq_base_swa(local)
    if (eps := config.get("rms_norm_eps", config.get("norm_eps"))) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := config.get("layer_norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    for field, add in (
        (("num_local_experts", "num_experts", "n_routed_experts"), writer.add_expert_count),
        (("num_experts_per_tok", "top_k_experts"), writer.add_expert_used_count),
        (("n_group",), writer.add_expert_group_count),
        (("topk_group",), writer.add_expert_group_used_count),
        (("head_dim",), writer.add_key_length),
        (("head_dim",), writer.add_value_length),
    ):
        value = next((config[one] for one in field if config.get(one) is not None), None)
        if value is not None:
            add(value)
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(config.get("eos_token_id") or 1)


def _no_facts(writer: Any, config: Config) -> None:
    return


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama_facts(writer: Any, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(_head_dim(config))


def _granite_facts(writer: Any, config: Config) -> None:
    _llama_facts(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _gemma2_facts(writer: Any, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _window_facts(writer: Any, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])


def _expert_facts(writer: Any, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _gpt_oss_facts(writer: Any, config: Config) -> None:
    _window_facts(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _mistral3_facts(writer: Any, config: Config) -> None:
    _llama_facts(writer, config)
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _glm4_facts(writer: Any, config: Config) -> None:
    factor = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.5)
    writer.add_rope_dimension_count(int(_head_dim(config) * factor))


def _olmo2_facts(writer: Any, config: Config) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])


def _cohere_facts(writer: Any, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.get("sliding_window") and config["model_type"] == "cohere2":
        writer.add_sliding_window(config["sliding_window"])


def _phi3_facts(writer: Any, config: Config) -> None:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * _head_dim(config)))
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _gemma4_facts(writer: Any, config: Config) -> None:
    types = config["layer_types"]
    full: Config = next((one for one in config.get("per_layer_config", {}).values() if one), {})
    slides = [one == "sliding_attention" for one in types]
    wide = config.get("global_head_dim") or full["head_dim"]
    for part in writer.kv_data:
        for one in ("attention.key_length", "attention.value_length", "attention.head_count_kv", "feed_forward_length"):
            part.pop(f"gemma4.{one}", None)
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    heads = config.get("num_global_key_value_heads") or full.get("num_key_value_heads")
    if heads is None:
        writer.add_head_count_kv(config["num_key_value_heads"])
    else:
        writer.add_head_count_kv([config["num_key_value_heads"] if one else heads for one in slides])
    inner, shared = config["intermediate_size"], _layers(config) - config["num_kv_shared_layers"]
    if config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([inner if layer < shared else 2 * inner for layer in range(_layers(config))])
    else:
        writer.add_feed_forward_length(inner)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("enable_moe_block"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _qwen35_facts(writer: Any, config: Config) -> None:
    rope = config["rope_parameters"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_count(int(_head_dim(config) * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0])
    if config.get("moe_intermediate_size"):
        _expert_facts(writer, config)


def _lfm2_facts(writer: Any, config: Config) -> None:
    for part in writer.kv_data:
        part.pop("lfm2.attention.head_count_kv", None)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if one == "conv" else heads for one in config["layer_types"]])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    width = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        multiple = config["block_multiple_of"]
        width = multiple * ((width + multiple - 1) // multiple)
    for part in writer.kv_data:
        part.pop("lfm2.feed_forward_length", None)
    writer.add_feed_forward_length(width)


def _falcon_h1_facts(writer: Any, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_d_ssm"] // config["mamba_d_head"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    if config.get("head_dim") is None:
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))


def _deepseek2_facts(writer: Any, config: Config) -> None:
    for part in writer.kv_data:
        for one in ("key_length", "value_length", "head_count_kv"):
            part.pop(f"deepseek2.attention.{one}", None)
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turning)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turning)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(turning)
    if (every := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * every)


_OWN_FACTS: dict[str, Callable[[Any, Config], None]] = {
    "llama": _llama_facts,
    "mistral3": _mistral3_facts,
    "smollm3": _llama_facts,
    "granite": _granite_facts,
    "gemma2": _gemma2_facts,
    "gemma3": _window_facts,
    "gemma4": _gemma4_facts,
    "qwen2moe": _expert_facts,
    "qwen3moe": _expert_facts,
    "gpt-oss": _gpt_oss_facts,
    "glm4": _glm4_facts,
    "olmo2": _olmo2_facts,
    "command-r": _cohere_facts,
    "cohere2": _cohere_facts,
    "phi3": _phi3_facts,
    "qwen35": _qwen35_facts,
    "qwen35moe": _qwen35_facts,
    "lfm2": _lfm2_facts,
    "falcon-h1": _falcon_h1_facts,
    "deepseek2": _deepseek2_facts,
}


# Tensors.


def _steps(architecture: str, config: Config, tensors: dict[str, Tensor]) -> Named:
    tensors = _merged_experts(tensors) if _is_merged(architecture) else tensors
    yield from _OWN_EXTRA.get(architecture, _no_tensors)(config)
    step = _OWN_STEPS.get(architecture, _as_it_is)
    for name, value in tensors.items():
        yield from step(config, name, value)


def _is_merged(architecture: str) -> bool:
    return architecture in ("llama", "qwen2moe", "qwen3moe", "qwen35moe", "deepseek2")


def _merged_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all experts of a matrix in one tensor."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        start, mark, end = name.partition(".experts.")
        number, _, rest = end.partition(".")
        if mark and number.isdecimal():
            stacks.setdefault(f"{start}.experts.{rest}", {})[int(number)] = value
        else:
            found[name] = value
    for name, parts in stacks.items():
        merged = name.replace("block_sparse_moe.experts", "feed_forward.experts").replace("model.layers", "layers")
        name = merged if "feed_forward" in merged else name
        found[name] = torch.stack([parts[number] for number in range(len(parts))])
    return found


def _no_tensors(config: Config) -> Named:
    return iter(())


def _as_it_is(config: Config, name: str, value: Tensor) -> Named:
    yield name, value


def _permute(value: Tensor, heads: int) -> Tensor:
    shape = heads, 2, value.shape[0] // heads // 2, *value.shape[1:]
    return value.reshape(shape).swapaxes(1, 2).reshape(value.shape)


def _llama(config: Config, name: str, value: Tensor) -> Named:
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        value = _permute(value, config["num_attention_heads"])
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        value = _permute(value, config["num_key_value_heads"])
    yield name, value


def _gemma(config: Config, name: str, value: Tensor) -> Named:
    if name != "lm_head.weight":
        yield name, value + 1 if name.endswith("norm.weight") else value


def _gemma4(config: Config, name: str, value: Tensor) -> Named:
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if name == "lm_head.weight":
        return
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", value
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", value
    else:
        is_bare = name.endswith("layer_scalar") or ".experts." in name
        yield f"{name}.weight" if is_bare else name, value


def _gemma4_extra(config: Config) -> Named:
    full = config["rope_parameters"]["full_attention"]
    wide = config.get("global_head_dim") or next(one for one in config["per_layer_config"].values() if one)["head_dim"]
    turning = int(wide * full["partial_rotary_factor"] / 2)
    yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (wide // 2 - turning))


def _llama_extra(config: Config) -> Named:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return
    dim, old = _head_dim(config), 8192
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        length = 2 * math.pi / float(frequency)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", torch.tensor(factors)


def _phi3_extra(config: Config) -> Named:
    rope = config["rope_parameters"]
    for one in ("long", "short"):
        if rope.get(f"{one}_factor"):
            yield f"rope_factors_{one}.weight", torch.tensor(rope[f"{one}_factor"])


def _gpt_oss(config: Config, name: str, value: Tensor) -> Named:
    if name.endswith("sinks"):
        yield f"{name}.weight", value
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), value
    elif name.endswith("down_proj"):
        yield f"{name}.weight", value.transpose(-1, -2)
    elif name.endswith("gate_up_proj_bias"):
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), value[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), value[..., 1::2]
    elif name.endswith("gate_up_proj"):
        value = value.transpose(-1, -2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), value[:, ::2]
        yield name.replace("gate_up_proj", "up_proj.weight"), value[:, 1::2]
    else:
        yield name, value


def _tiled(value: Tensor, dim: int, keys: int, heads: int, width: int) -> Tensor:
    shape = list(value.shape)
    split = value.reshape(*shape[:dim], keys, heads // keys, width, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).reshape(shape)


def _qwen35(config: Config, name: str, value: Tensor) -> Named:
    keys, heads, width = (config[f"linear_{one}"] for one in ("num_key_heads", "num_value_heads", "value_head_dim"))
    others = 2 * keys * config["linear_key_head_dim"]
    if "linear_attn." in name:
        if ".in_proj_qkv." in name:
            value = torch.cat([value[:others], _tiled(value[others:], 0, keys, heads, width)])
        elif ".in_proj_z." in name:
            value = _tiled(value, 0, keys, heads, width)
        elif ".in_proj_a." in name or ".in_proj_b." in name or ".A_log" in name or ".dt_bias" in name:
            value = _tiled(value, 0, keys, heads, 1)
        elif ".conv1d" in name:
            value = value.squeeze()
            value = torch.cat([value[:others], _tiled(value[others:], 0, keys, heads, width)])
        elif ".out_proj." in name:
            value = _tiled(value, 1, keys, heads, width)
    if name.endswith(".A_log"):
        value = -torch.exp(value)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if name.endswith("mlp.experts.gate_up_proj"):
        gate, up = value.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    else:
        yield f"{name}.weight" if name.endswith("mlp.experts.down_proj") else name, value


def _lfm2(config: Config, name: str, value: Tensor) -> Named:
    yield name, value.squeeze(1) if "conv.conv" in name else value


def _falcon_h1(config: Config, name: str, value: Tensor) -> Named:
    if name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    if "conv1d" in name:
        value = value.squeeze()
    if name.endswith(".A_log"):
        value = -torch.exp(value)
    if name.endswith((".A_log", ".D")):
        value = value.reshape(*value.shape, 1)
    if "down_proj" in name:
        value = value * config["mlp_multipliers"][1]
    elif "gate_proj" in name:
        value = value * config["mlp_multipliers"][0]
    elif "k_proj" in name:
        value = value * config["key_multiplier"] * config["attention_in_multiplier"]
    elif "q_proj" in name or "v_proj" in name:
        value = value * config["attention_in_multiplier"]
    elif "o_proj" in name:
        value = value * config["attention_out_multiplier"]
    elif "out_proj" in name:
        value = value * config["ssm_out_multiplier"]
    elif "in_proj" in name:
        value = value * config["ssm_in_multiplier"]
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, group, group, len(value) - 2 * inner - 2 * group]
        parts = zip(torch.split(value, sizes), config["ssm_multipliers"], strict=True)
        value = torch.cat([part * factor for part, factor in parts])
    elif "lm_head" in name:
        value = value * config["lm_head_multiplier"]
    elif "embed_tokens" in name:
        value = value * config["embedding_multiplier"]
    elif "mamba.norm" in name:
        value = value.reshape(config["mamba_n_groups"], -1)
    yield name, value


def _deepseek2(config: Config, name: str, value: Tensor) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), value
        return
    nope, width = config["qk_nope_head_dim"], config["v_head_dim"]
    both = value.view(config["num_attention_heads"], nope + width, value.shape[-1])
    keys, values = torch.split(both, [nope, width], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


_OWN_STEPS: dict[str, Callable[[Config, str, Tensor], Named]] = {
    "llama": _llama,
    "mistral3": _llama,
    "smollm3": _llama,
    "granite": _llama,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "lfm2": _lfm2,
    "falcon-h1": _falcon_h1,
    "deepseek2": _deepseek2,
}
_OWN_EXTRA: dict[str, Callable[[Config], Named]] = {
    "llama": _llama_extra,
    "phi3": _phi3_extra,
    "gemma4": _gemma4_extra,
}
