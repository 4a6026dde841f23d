"""config.json is read as transformers 5.x reads it, and what it gets wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.common.errors import StartupError
from penstock.generation.core.delta_heads import DELTA_TYPES
from penstock.generation.core.index_layers import SPARSE_TYPES
from penstock.generation.core.latent_heads import LATENT_TYPES
from penstock.generation.core.model_config import ModelConfig, ModelRoute, RopeConfig
from penstock.generation.layers.rope import RotaryEmbedding, inverse_frequencies
from penstock.generation.models.registry import FAMILIES, read_model_config
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
# Heads share one latent.
ALIKE: dict[str, Any] = {"num_key_value_heads": 8, "num_experts_per_tok": 2}


def read(
    folder: Path,
    model_type: str,
    generation: dict[str, Any] | None = None,
    route: ModelRoute | None = None,
    **fields: Any,
) -> ModelConfig:
    """The configuration of a config.json with SMALL's fields and these; a field given as ... is left out."""
    values = {"model_type": model_type, **SMALL, **fields}
    text = json.dumps({name: value for name, value in values.items() if value is not ...})
    (folder / "config.json").write_text(text)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder, route or ModelRoute())


def refused(folder: Path, model_type: str = "llama", **fields: Any) -> str:
    """The message of the native route's StartupError."""
    with pytest.raises(StartupError) as caught:
        read(folder, model_type, route=ModelRoute("native"), **fields)
    assert caught.value.flag == "MODEL"
    assert str(folder / "config.json") in caught.value.message
    return caught.value.message


def test_families_differ_in_flags_only(tmp_path: Path) -> None:
    flags = {
        family: (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.head_dim)
        for family in ("llama", "qwen2", "qwen3", "mistral")
        for config in [read(tmp_path, family)]
    }
    assert flags == {
        "llama": (False, False, False, False, 8),
        "qwen2": (True, False, False, False, 8),
        "qwen3": (False, False, False, True, 128),
        "mistral": (False, False, False, False, 8),
    }


def defaults(folder: Path, family: str) -> tuple[ModelConfig, Any]:
    """Return a configuration without fields, as it is read and as transformers has it."""
    # A field without a default, and a type that transformers has under another name.
    needed = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **needed}))
    known = "deepseek_v3" if family == "kimi_k2" else family
    return read_model_config(folder), AutoConfig.for_model(known, **needed)


def test_types_with_a_delta_rule_are_known_without_torch(tmp_path: Path) -> None:
    found = tuple(family for family in FAMILIES if defaults(tmp_path, family)[0].delta is not None)
    assert found == DELTA_TYPES


@pytest.mark.parametrize("family", DELTA_TYPES)
def test_absent_widths_of_a_delta_rule_are_transformers(tmp_path: Path, family: str) -> None:
    config, expected = defaults(tmp_path, family)
    heads = config.delta
    assert heads is not None
    assert heads.layers == tuple(one == "linear_attention" for one in expected.layer_types)
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    assert [heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim, heads.kernel] == [
        getattr(expected, f"linear_{name}") for name in names
    ]
    assert config.num_kv_layers == expected.layer_types.count("full_attention")


def test_types_with_compressed_keys_and_values_are_known_without_torch(tmp_path: Path) -> None:
    latent = tuple(family for family in FAMILIES if defaults(tmp_path, family)[0].latent is not None)
    assert latent == LATENT_TYPES


@pytest.mark.parametrize("family", LATENT_TYPES)
def test_absent_widths_of_compressed_keys_and_values_are_transformers(tmp_path: Path, family: str) -> None:
    config, expected = defaults(tmp_path, family)
    assert config.latent is not None
    assert (config.num_kv_heads, config.head_dim) == (1, expected.kv_lora_rank + expected.qk_rope_head_dim)
    assert config.latent.query_rank == (expected.q_lora_rank or 0)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert [config.latent.rank, config.latent.plain_dim, config.latent.turned_dim, config.latent.value_dim] == [
        getattr(expected, name) for name in names
    ]
    always = family in ("deepseek_v2", *SPARSE_TYPES)
    assert config.rope.is_interleaved == getattr(expected, "rope_interleave", always)


@pytest.mark.parametrize("family", SPARSE_TYPES)
def test_absent_widths_of_an_indexer_are_transformers(tmp_path: Path, family: str) -> None:
    config, expected = defaults(tmp_path, family)
    assert config.index is not None
    found = config.index.count, config.index.dim, config.index.most
    assert found == (expected.index_n_heads, expected.index_head_dim, expected.index_topk)
    assert config.index.layers == (True,) * config.num_layers
    assert config.index.is_interleaved == (family == "glm_moe_dsa")


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 4},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FSSFSFSS"},
        {"index_topk_pattern": ["full", "shared"] * 4},
        {"indexer_types": ["full"] + ["shared"] * 7, "index_topk_freq": 2},
    ],
    ids=str,
)
def test_layers_that_share_a_choice_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    expected = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=8, **fields).indexer_types
    config = read(tmp_path, "glm_moe_dsa", num_hidden_layers=8, **ALIKE, **fields)
    assert config.index is not None
    assert ["full" if one else "shared" for one in config.index.layers] == expected
    assert config.index.num_layers == expected.count("full")


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_transformers_defaults(tmp_path: Path, family: str) -> None:
    config, expected = defaults(tmp_path, family)
    assert config.num_layers == expected.num_hidden_layers
    assert config.num_heads == expected.num_attention_heads
    if config.latent is None:
        assert config.shape(0).num_kv_heads == (expected.num_key_value_heads or config.num_heads)
    # Of the first layer, where they differ.
    expected.allow_global_per_layer_attribute_access = True
    width = config.rope_width(0)
    assert width == (getattr(expected, "head_dim", None) or expected.hidden_size // config.num_heads)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"):
        # One without plain MLPs has no width of them.
        assert getattr(config, name) == getattr(expected, name, 512)
    assert config.rms_norm_eps == getattr(expected, "rms_norm_eps", getattr(expected, "layer_norm_eps", None))
    rope = expected.rope_parameters
    rope = rope.get("sliding_attention" if config.layer_shapes else "full_attention", rope)
    assert (config.rope.theta, config.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])
    assert (config.rope.rotary_dim or width) == width * rope.get("partial_rotary_factor", 1.0)
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert config.bos_token_id == expected.bos_token_id
    eos = expected.eos_token_id
    assert config.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_give_transformers_windows_and_experts(tmp_path: Path, family: str) -> None:
    config, expected = defaults(tmp_path, family)
    types = getattr(expected, "layer_types", None)
    window = getattr(expected, "sliding_window", None) or None
    if types is not None:
        assert config.sliding_windows == tuple(window if one == "sliding_attention" else None for one in types)
    else:
        assert config.sliding_windows == (window,) * config.num_layers
    if config.experts is not None:
        width = "moe_intermediate_size" if hasattr(expected, "moe_intermediate_size") else "intermediate_size"
        experts, inner = config.experts, getattr(expected, width)
        count = expected.num_experts if hasattr(expected, "num_experts") else expected.n_routed_experts
        assert (experts.count, experts.per_row) == (count, expected.num_experts_per_tok)
        assert experts.inner == inner
        shared = inner * getattr(expected, "n_shared_experts", 0)
        assert experts.shared_inner == getattr(expected, "shared_expert_intermediate_size", shared)
        assert experts.routing.scale == getattr(expected, "routed_scaling_factor", 1.0)
        if experts.routing.is_sigmoid:
            groups = (experts.routing.num_groups, experts.routing.groups_of_row)
            assert groups == (expected.n_group, expected.topk_group)
            assert experts.sums_to_one == expected.norm_topk_prob


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' is not supported"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 numbers, 8 dims turn in pairs",
        ),
        ("glm4", {"partial_rotary_factor": 0.4}, "must leave an even number of 128 dims"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, num_hidden_layers is 4"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is not supported"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "is more than num_local_experts"),
        ("qwen3_moe", {"num_experts": 10**9}, "num_experts must be at most"),
        ("deepseek_v2", {**ALIKE, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek_v2", {**ALIKE, "mlp_bias": True}, "mlp_bias with experts, which have none, is not supported"),
        ("deepseek_v3", {}, "num_key_value_heads must be num_attention_heads"),
        ("deepseek_v3", {**ALIKE, "qk_rope_head_dim": 9}, "qk_rope_head_dim (9) must be even"),
        ("deepseek_v3", {**ALIKE, "n_group": 7}, "n_group (7) does not divide n_routed_experts (256)"),
        ("deepseek_v3", {**ALIKE, "num_experts_per_tok": 129}, "(129) is more than 4 of 8 groups have"),
        ("deepseek_v3", {**ALIKE, "quantization_config": {"quant_method": "gguf"}}, "of gguf is not read"),
        ("deepseek_v32", {**ALIKE, "q_lora_rank": None}, "q_lora_rank must be a whole number: the indexer reads"),
        ("deepseek_v32", {**ALIKE, "index_topk": 1}, "index_topk must be a whole number of at least 2"),
        ("deepseek_v32", {**ALIKE, "index_head_dim": 32}, "index_head_dim (32) is less than qk_rope_head_dim (64)"),
        (
            "glm_moe_dsa",
            {**ALIKE, "indexer_types": ["full"]},
            "indexer_types must list 'full' or 'shared' for each of 4",
        ),
        ("glm_moe_dsa", {**ALIKE, "index_topk_pattern": "FSXF"}, "index_topk_pattern must list 'full' or 'shared'"),
        ("glm_moe_dsa", {**ALIKE, "index_topk_pattern": "SFFF"}, "index_topk_pattern must begin with 'full'"),
        ("glm4_moe_lite", {**ALIKE, "mlp_layer_types": ["sparse"]}, "mlp_layer_types must list 'dense' or 'sparse'"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "without 'full_attention' is not supported"),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types must list 'linear_attention' or"),
        ("qwen3_next", {"linear_num_value_heads": 5}, "linear_num_value_heads (5) is not a multiple of"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit other than 7.0 is not supported"),
    ],
)
def test_a_field_that_a_family_cannot_honour_is_named(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    assert message in refused(tmp_path, family, **fields)


def test_kv_heads_null_means_one_per_query_head(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", num_key_value_heads=None).num_kv_heads == 8


def test_explicit_head_dim_need_not_divide_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", hidden_size=60, head_dim=16).head_dim == 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None, None)),
        ({"sliding_window": 9, "max_window_layers": 1}, (None, None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (None, None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (None, None, None, 9)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(tmp_path: Path, family: str, fields: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert read(tmp_path, family, **fields).sliding_windows == expected


def test_every_layer_of_mistral_slides(tmp_path: Path) -> None:
    assert read(tmp_path, "mistral", sliding_window=12).sliding_windows == (12,) * 4
    assert read(tmp_path, "mistral", sliding_window=None).sliding_windows == (None,) * 4
    assert read(tmp_path, "mistral").sliding_windows == (4096,) * 4


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen2", generation={"eos_token_id": [7, 5, 7]}, eos_token_id=1)
    assert config.eos_token_ids == (7, 5)
    assert read(tmp_path, "qwen2", generation={}, eos_token_id=1).eos_token_ids == (1,)


@pytest.mark.parametrize(("given", "expected"), [(..., None), (None, None), (-1, None), (0, 0), (7, 7)])
def test_a_pad_id_of_minus_one_means_none(tmp_path: Path, given: Any, expected: int | None) -> None:
    assert read(tmp_path, "llama", pad_token_id=given).pad_token_id == expected


def test_dtype_is_read_under_both_names(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", dtype="bfloat16").checkpoint_dtype == "bfloat16"
    assert read(tmp_path, "llama", torch_dtype="float16").checkpoint_dtype == "float16"
    assert read(tmp_path, "llama").checkpoint_dtype is None


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
]


@pytest.mark.parametrize("parameters", ROPES, ids=lambda parameters: "-".join(map(str, parameters.values())))
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_equal_transformers(tmp_path: Path, parameters: dict[str, Any], theta: float) -> None:
    rope = read(tmp_path, "llama", rope_parameters=parameters | {"rope_theta": theta}, head_dim=64).rope
    reference = LlamaConfig(**SMALL, head_dim=64, rope_parameters=parameters | {"rope_theta": theta})
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, atol=0, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(scale)


@pytest.mark.parametrize("parameters", ROPES, ids=lambda parameters: "-".join(map(str, parameters.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_hold_the_very_bits_that_a_call_computes(
    tmp_path: Path, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    rope = read(tmp_path, "llama", rope_parameters=parameters | {"rope_theta": 10_000.0}, head_dim=40).rope
    rotary = RotaryEmbedding(rope, 40, torch.device("cpu"), dtype, max_positions=5000)
    for length in (1, 7, 3000, 5001, 30_000, 30_001):
        positions = torch.tensor([length - 1, 0, length // 2])
        for table, expected in zip(rotary.tables(length), rotary(positions), strict=True):
            assert len(table) >= length
            assert torch.equal(table[positions], expected[:, 0])


def test_tables_grow_in_place_and_by_a_piece_at_a_time() -> None:
    computed = []

    class Watched(RotaryEmbedding):
        def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            computed.append(len(positions_T))
            return super().__call__(positions_T)

    rotary = Watched(RopeConfig("default", 1e6), 64, torch.device("cpu"), torch.bfloat16, max_positions=100_000)
    where = {tuple(table.data_ptr() for table in rotary.tables(length)) for length in range(1, 100_001, 999)}
    assert len(where) == 1
    assert max(computed) < 5000
    assert sum(computed) < 105_000


def test_theta_inside_rope_parameters_wins(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert read(tmp_path, "llama", rope_parameters=parameters, rope_theta=1e4).rope.theta == 5e5
    assert read(tmp_path, "llama", rope_theta=1e6).rope.theta == 1e6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 60}, "hidden_size (60) is not a multiple of num_attention_heads (8)"),
        ({"num_key_value_heads": 3}, "num_attention_heads (8) is not a multiple of num_key_value_heads (3)"),
        ({"vocab_size": "big"}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"head_dim": 7}, "head_dim (7) must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method 'hqq' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is missing"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling.rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "rope_parameters.low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor other than 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id must be a token id"),
        ({"model_type": ...}, "model_type is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    values = {"model_type": "llama"} | fields
    assert named in refused(tmp_path, values.pop("model_type"), **values)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "found 'chunked_attention'"),
        ({"layer_types": [1] * 4}, "layer_types must be a list of"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, but use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a whole number of at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_window_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    assert named in refused(tmp_path, "qwen2", **fields)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_the_native_route_names_the_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(StartupError, match=r"'gpt2' is not native; native are llama, .*--model-route auto"):
        read_model_config(tmp_path, ModelRoute("native"))


def test_a_missing_config_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(StartupError, match="not a folder"):
        read_model_config(tmp_path / "nowhere")
