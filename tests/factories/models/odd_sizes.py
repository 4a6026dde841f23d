"""Sizes of model types that no other size follows from, drawn at random.

A row says how a field is drawn, of any type that has it. A type's own rows say what binds its fields; `KEPT` leaves one
as the small model has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from factories.models.model_types import LAYERS, VOCAB_SIZE, text_part, tiny_config


class Odd:
    """Values of one configuration, each drawn when it is first asked for. `known`: the fields of the small model."""

    def __init__(self, source: random.Random, model_type: str, known: Mapping[str, Any]) -> None:
        self.source, self.known = source, known
        self._rows = {**_FIELDS, **_TYPES.get(model_type, {})}
        self._drawn: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._drawn:
            row = self._rows[name]
            self._drawn[name] = row(self) if callable(row) else row
        return self._drawn[name]

    def fields(self) -> dict[str, Any]:
        """Return the values of all fields that the type has, without those that are kept."""
        values = {name: self[name] for name in self._rows if name in self.known}
        return {name: value for name, value in values.items() if value is not KEPT}

    def number(self, low: int, high: int, step: int = 1) -> int:
        """Draw a multiple of `step` from `low` to `high` of them."""
        return step * self.source.randint(low, high)

    def one_of(self, *values: Any) -> Any:
        """Draw one of some values."""
        return self.source.choice(values)

    def divisor(self, number: int) -> int:
        """Draw a divisor of a number."""
        return int(self.one_of(*(one for one in range(1, number + 1) if number % one == 0)))

    def around(self, value: float) -> float:
        """Draw a number from two thirds of a value to one and a half of it."""
        return round(value * 1.5 ** self.source.uniform(-1, 1), 3)


Row = Callable[[Odd], Any] | int | str
# A field that stays as the small model has it.
KEPT = "kept"


def number(low: int, high: int, step: int = 1) -> Row:
    """Row of a multiple of `step` from `low` to `high` of them."""
    return lambda odd: odd.number(low, high, step)


def one_of(*values: Any) -> Row:
    """Row of one of some values."""
    return lambda odd: odd.one_of(*values)


def same_as(name: str) -> Row:
    """Row of the value of another one."""
    return lambda odd: odd[name]


def around(value: float) -> Row:
    """Row of a number near a value."""
    return lambda odd: odd.around(value)


def times(count: int | str, name: str) -> Row:
    """Row of a multiple of another one."""
    return lambda odd: (odd[count] if isinstance(count, str) else count) * odd[name]


def layers(*kinds: str) -> Row:
    """Row of a list with a kind for each layer, all of them at least once, the last one last."""

    def draw(odd: Odd) -> Sequence[str]:
        found = [*kinds[:-1], *odd.source.choices(kinds, k=LAYERS - len(kinds))]
        odd.source.shuffle(found)
        return [*found, kinds[-1]]

    return draw


def shuffled(name: str) -> Row:
    """Row of the small model's list in another order, where it has one."""
    return lambda odd: odd.source.sample(odd.known[name], k=LAYERS) if odd.known[name] else KEPT


EITHER = one_of(False, True)
# Rows are whole 16 bytes, as transformers' grouped products of experts want them.
WIDE, NARROW = number(6, 40, 4), number(5, 20, 4)
SLIDING = layers("sliding_attention", "full_attention")


def _hidden(odd: Odd) -> int:
    """Draw a hidden size: not all heads together where they have a width of their own. Most types want a multiple."""
    return int(odd["heads"] * (odd.number(2, 8, 4) if "head_dim" in odd.known else odd["width"]))


def _chosen_experts(odd: Odd) -> int:
    """Draw the number of experts of a row: of those in the groups that a row chooses."""
    most = odd["experts"] // odd["groups"] * odd["chosen groups"]
    return odd.number(1, min(3, most))


# What several fields are made of.
_PARTS: Mapping[str, Row] = {
    "heads": number(2, 6),
    "width": number(2, 7, 4),
    "groups": one_of(1, 2),
    "chosen groups": lambda odd: odd.number(1, odd["groups"]),
    "experts": lambda odd: odd.number(2, 3, odd["groups"]),
    "chosen": _chosen_experts,
    "shared": number(1, 2),
    "vocabulary": number(VOCAB_SIZE, VOCAB_SIZE + 50),
    "window": number(3, 30),
    "inner": WIDE,
    "kernel": number(2, 5),
}
_FIELDS: Mapping[str, Row] = {
    **_PARTS,
    "vocab_size": same_as("vocabulary"),
    "vocab_size_per_layer_input": same_as("vocabulary"),
    "hidden_size": _hidden,
    "intermediate_size": same_as("inner"),
    "num_attention_heads": same_as("heads"),
    "num_key_value_heads": lambda odd: odd.divisor(odd["heads"]),
    "head_dim": same_as("width"),
    "tie_word_embeddings": EITHER,
    "attention_bias": EITHER,
    "mlp_bias": EITHER,
    "sliding_window": same_as("window"),
    "attention_window_size": same_as("window"),
    "attention_chunk_size": number(5, 30),
    # Decoders of encoder-decoders.
    "encoder_attention_heads": same_as("heads"),
    "decoder_attention_heads": same_as("heads"),
    "encoder_ffn_dim": same_as("inner"),
    "decoder_ffn_dim": same_as("inner"),
    "ffn_dim": same_as("inner"),
    "word_embed_proj_dim": lambda odd: odd.one_of(odd["hidden_size"], odd.number(8, 30, 2)),
    # Experts.
    "num_experts": same_as("experts"),
    "num_local_experts": same_as("experts"),
    "n_routed_experts": same_as("experts"),
    "moe_num_experts": same_as("experts"),
    "num_experts_per_tok": same_as("chosen"),
    "num_experts_per_token": same_as("chosen"),
    "moe_k": same_as("chosen"),
    "moe_topk": same_as("chosen"),
    "top_k_experts": same_as("chosen"),
    "n_group": same_as("groups"),
    "num_expert_group": same_as("groups"),
    "topk_group": same_as("chosen groups"),
    "n_shared_experts": same_as("shared"),
    "num_shared_experts": same_as("shared"),
    "moe_num_shared_experts": same_as("shared"),
    "moe_intermediate_size": NARROW,
    "shared_expert_intermediate_size": NARROW,
    "moe_shared_expert_intermediate_size": NARROW,
    "shared_intermediate_size": NARROW,
    "dense_intermediate_size": WIDE,
    "expert_ffn_hidden_size": NARROW,
    "ffn_hidden_size": WIDE,
    "intermediate_size_mlp": WIDE,
    "norm_topk_prob": EITHER,
    "routed_scaling_factor": around(1.5),
    "first_k_dense_replace": number(0, 2),
    "layer_types": shuffled("layer_types"),
    "mlp_layer_types": shuffled("mlp_layer_types"),
    "no_rope_layers": shuffled("no_rope_layers"),
    "window_size": same_as("window"),
    # Attention through a narrow projection.
    "kv_lora_rank": number(2, 8, 4),
    "q_lora_rank": number(2, 8, 4),
    "qk_rope_head_dim": number(1, 4, 4),
    "qk_nope_head_dim": number(1, 5, 4),
    "qk_head_dim": lambda odd: odd["qk_rope_head_dim"] + odd["qk_nope_head_dim"],
    "v_head_dim": number(2, 6, 4),
    "index_topk": number(6, 20),
    "index_head_dim": lambda odd: odd["qk_rope_head_dim"] + odd.number(1, 4, 4),
    "index_n_heads": number(20, 30),
    # States.
    "conv_kernel": same_as("kernel"),
    "conv_L_cache": same_as("kernel"),
    "conv1d_width": same_as("kernel"),
    "linear_conv_kernel_dim": same_as("kernel"),
    "mamba_d_conv": same_as("kernel"),
    "short_conv_kernel_size": same_as("kernel"),
    "linear_num_key_heads": number(1, 3),
    "linear_num_value_heads": lambda odd: odd.number(1, 3, odd["linear_num_key_heads"]),
    "linear_key_head_dim": number(2, 6, 4),
    "linear_value_head_dim": number(2, 6, 4),
    "mamba_d_state": number(2, 6, 4),
    "ssm_state_size": number(2, 6, 4),
    "state_size": number(2, 6, 4),
    "time_step_rank": number(2, 7),
    "mamba_dt_rank": number(2, 7),
    # Scales, caps and norms.
    "query_pre_attn_scalar": number(6, 40),
    "final_logit_softcapping": one_of(None, 7.0, 30.0),
    "attn_logit_softcapping": one_of(None, 7.0, 50.0),
    "logit_scale": around(0.1),
    "logits_scaling": around(1.5),
    "embedding_multiplier": around(2.0),
    "residual_multiplier": around(0.8),
    "attention_multiplier": around(0.25),
    "use_parallel_residual": EITHER,
    "use_qk_norm": EITHER,
    "qk_layernorm": EITHER,
    "laurel_rank": number(1, 5, 4),
    "altup_num_inputs": number(2, 4),
    "hidden_size_per_layer_input": number(1, 5, 4),
}
# Heads of Mamba's second version: as wide together as the part that they scan.
_MAMBA2: Mapping[str, Row] = {
    "mamba_n_heads": times(2, "heads"),
    "mamba_d_head": lambda odd: odd["hidden_size"] // odd["heads"],
    "mamba_n_groups": lambda odd: odd.divisor(odd["mamba_n_heads"]),
}
# Layers of other heads and widths than these are in a part that is kept.
_FOUR_HEADS: Mapping[str, Row] = {"heads": 4, "num_key_value_heads": KEPT}
_TYPES: Mapping[str, Mapping[str, Row]] = {
    "bamba": {**_MAMBA2, "layer_types": KEPT, "attn_layer_indices": one_of([0], [1, 2], [0, 3], [3])},
    "codegen": _FOUR_HEADS,
    "dbrx": {
        "tie_word_embeddings": KEPT,
        "attn_config": lambda odd: {"kv_n_heads": odd["num_key_value_heads"], "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": lambda odd: {
            "hidden_size": odd["hidden_size"],
            "ffn_hidden_size": odd["inner"],
            "moe_num_experts": odd["experts"],
            "moe_top_k": odd["chosen"],
        },
    },
    # Two calls with half of the heads each.
    "diffllama": {"heads": number(1, 3, 2), "num_key_value_heads": lambda odd: 2 * odd.divisor(odd["heads"] // 2)},
    "electra": {"embedding_size": WIDE},
    "falcon": {
        "multi_query": EITHER,
        "parallel_attn": lambda odd: odd["new_decoder_architecture"] or odd.one_of(False, True),
        "bias": EITHER,
        "alibi": EITHER,
        "new_decoder_architecture": EITHER,
        "num_kv_heads": lambda odd: odd.divisor(odd["heads"]) if odd["new_decoder_architecture"] else odd["heads"],
        # Transformers' old layers have no first norm where this is 2.
        "num_ln_in_parallel_attn": lambda odd: odd.one_of(None, 1, *([2] if odd["new_decoder_architecture"] else [])),
    },
    "falcon_h1": {
        "mamba_n_heads": times("heads", "mamba_n_groups"),
        "mamba_n_groups": number(1, 3),
        "mamba_d_head": number(2, 6, 4),
        "mamba_d_ssm": times("mamba_n_heads", "mamba_d_head"),
        "mamba_rms_norm": EITHER,
        "lm_head_multiplier": around(1.0),
        "key_multiplier": around(1.0),
        "attention_in_multiplier": around(1.0),
        "attention_out_multiplier": around(1.0),
        "ssm_in_multiplier": around(1.0),
        "ssm_out_multiplier": around(1.0),
        "mlp_multipliers": lambda odd: [odd.around(1.0) for _ in range(2)],
        "ssm_multipliers": lambda odd: [odd.around(1.0) for _ in range(5)],
    },
    "falcon_mamba": {"expand": number(1, 3)},
    "gemma3n_text": {
        "final_logit_softcapping": one_of(7.0, 30.0),
        "activation_sparsity_pattern": shuffled("activation_sparsity_pattern"),
    },
    "gpt_bigcode": {"multi_query": EITHER},
    "gpt_neo": {"attention_types": one_of([[["global", "local"], 2]], [[["local", "local", "global", "local"], 1]])},
    "gptj": {"rotary_dim": number(1, 2, 4)},
    "granitemoehybrid": {**_MAMBA2, "layer_types": layers("mamba", "attention")},
    "helium": {"head_dim": lambda odd: odd["hidden_size"] // odd["heads"]},
    "internlm3": {"attention_bias": KEPT, "mlp_bias": KEPT},
    "jamba": {
        "layer_types": KEPT,
        "attn_layer_period": number(2, 4),
        "attn_layer_offset": lambda odd: odd.number(0, odd["attn_layer_period"] - 1),
        "expert_layer_period": number(1, 3),
        "expert_layer_offset": lambda odd: odd.number(0, odd["expert_layer_period"] - 1),
    },
    # Layers may have other heads.
    "laguna": {
        "num_attention_heads_per_layer": lambda odd: [
            odd.number(1, 3, odd["num_key_value_heads"]) for _ in range(LAYERS)
        ],
    },
    "lfm2": {"layer_types": layers("conv", "full_attention")},
    "lfm2_moe": {"layer_types": layers("conv", "full_attention")},
    "llama4_text": {
        "layer_types": KEPT,
        "moe_layers": lambda odd: sorted(odd.source.sample(range(LAYERS), k=2)),
        "no_rope_layers": KEPT,
        "floor_scale": number(5, 64),
        "attn_scale": around(0.3),
    },
    # One expert a row is a case that its modules do not know.
    "longcat_flash": {"chosen": 2},
    "mamba": {"expand": number(1, 3)},
    "mamba2": {
        "expand": number(1, 3),
        "num_heads": times("expand", "heads"),
        "head_dim": lambda odd: odd["hidden_size"] // odd["heads"],
        "n_groups": lambda odd: odd.divisor(odd["num_heads"]),
    },
    "mimo_v2_flash": _FOUR_HEADS,
    "minicpm3": {"scale_emb": around(4.0), "scale_depth": around(1.4), "dim_model_base": number(20, 90)},
    "minimax": {"sliding_window": KEPT},
    "nemotron_h": {
        "layer_types": KEPT,
        "layers_block_type": shuffled("layers_block_type"),
        "n_groups": number(1, 3),
        "mamba_num_heads": times("heads", "n_groups"),
        "mamba_head_dim": number(2, 6, 4),
    },
    "olmo": {"clip_qkv": one_of(None, 3.0)},
    "olmoe": {"clip_qkv": one_of(None, 3.0)},
    # Parts of a head's rotated half, for time, height and width.
    "qwen2_5_vl_text": {
        "mrope": lambda odd: odd.number(1, (odd["width"] // 2 - 1) // 2),
        "rope_parameters": lambda odd: {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [odd["width"] // 2 - 2 * odd["mrope"], odd["mrope"], odd["mrope"]],
        },
    },
    "recurrent_gemma": {
        "layer_types": KEPT,
        # Its cache knows no other width.
        "lru_width": same_as("hidden_size"),
        "block_types": one_of(["recurrent", "attention"], ["recurrent", "recurrent", "attention"]),
    },
    "roformer": {"embedding_size": WIDE},
    "smollm3": {"layer_types": SLIDING},
    "step3p5": {
        "layer_types": SLIDING,
        "num_sliding_attention_heads": lambda odd: odd.number(1, 3, odd["num_key_value_heads"]),
    },
    # A quarter of a head turns.
    "stablelm": {"width": number(1, 4, 8)},
}


def odd_sizes(source: random.Random, model_type: str) -> dict[str, Any]:
    """Return fields of a type's text part."""
    text = text_part(tiny_config(model_type))
    return Odd(source, text.model_type, {**dict.fromkeys(text.attribute_map), **text.to_dict()}).fields()
