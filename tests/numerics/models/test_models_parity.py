"""Every native family in float32 gives transformers' logits and greedy ids, whatever the chunks, batches and blocks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factories.models.checkpoints import LLAMA3_ROPE, VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import cpu_device
from penstock.generation.core.delta_heads import DELTA_TYPES
from penstock.generation.core.latent_heads import LATENT_TYPES
from penstock.generation.layers.latent_prompts import LEAST_ROWS
from penstock.generation.models.registry import load_model

TOLERANCE = 1e-4
BATCH_TOLERANCE = 2e-5
NUM_PROMPTS, NEW_TOKENS = 5, 48


class Case(NamedTuple):
    """A checkpoint: family, how many bytes a shard holds, what differs from the factory's defaults."""

    family: str
    name: str
    config: dict[str, Any]
    max_shard_size: str = "5GB"


MHA: dict[str, Any] = {"num_key_value_heads": 4}
MQA: dict[str, Any] = {"num_key_value_heads": 1}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MIXED_WINDOW: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A rope_parameters override."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


CASES = [
    Case("llama", "gqa-llama3-rope", {"rope_parameters": LLAMA3_ROPE}),
    Case("llama", "mha-tied", MHA | TIED),
    Case("llama", "mqa-sharded", MQA, "20KB"),
    Case("llama", "all-biases", {"attention_bias": True, "mlp_bias": True}),
    Case("llama", "head-dim", {"head_dim": 32}),
    Case("llama", "linear-rope", rope("linear", factor=2.0)),
    Case("llama", "dynamic-rope", rope("dynamic", factor=2.0)),
    Case("llama", "yarn-rope", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    Case("qwen2", "gqa-tied", TIED),
    Case("qwen2", "mha-untied-sharded", MHA, "20KB"),
    Case("qwen2", "tied-sharded", TIED, "20KB"),
    Case("qwen2", "window-from-layer-1", WINDOW),
    Case("qwen2", "window-by-layer-types", MIXED_WINDOW),
    Case("qwen3", "gqa", {}),
    Case("qwen3", "mha-tied", MHA | TIED),
    Case("qwen3", "window-biases-sharded", WINDOW | {"attention_bias": True}, "20KB"),
    Case("mistral", "gqa", {}),
    Case("mistral", "mha-window-tied", MHA | TIED | {"sliding_window": 11}),
    Case("mistral", "window-head-dim-sharded", {"sliding_window": 6, "head_dim": 8}, "20KB"),
]
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 128,
    **rope("longrope", short_factor=[1.0, 1.3, 2.0], long_factor=[2.0, 4.0, 9.0]),
}


BIASED: dict[str, Any] = {"attention_bias": True}
DEEPSEEK_YARN = rope("yarn", factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)
# As published: the same factors for all lengths.
LONGROPE_OF_MINICPM = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.3, 2.0],
    long_factor=[1.0, 1.1, 1.3, 2.0],
    original_max_position_embeddings=512,
)


def ropes(**full: Any) -> dict[str, Any]:
    """rope_parameters of full and of sliding layers."""
    local = {"rope_type": "default", "rope_theta": 1_000.0}
    return {"rope_parameters": {"full_attention": {"rope_theta": 10_000.0, **full}, "sliding_attention": local}}


# As of Gemma 4 31B: layers with windows have more key/value heads than those that read everything.
GEMMA4_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    **ropes(rope_type="proportional", partial_rotary_factor=0.5),
}

CASES += [
    Case("phi3", "partial-rotary-tied", TIED),
    Case("phi3", "window-sharded", {"sliding_window": 7, "partial_rotary_factor": 1.0}, "20KB"),
    Case("phi3", "longrope", LONGROPE),
    Case("granite", "biases-sharded", BIASES, "20KB"),
    Case("granite", "tied", TIED),
    Case("olmo2", "mha", MHA),
    Case("olmo3", "two-ropes-sharded", ropes(rope_type="linear", factor=2.0), "20KB"),
    Case("smollm3", "no-rope-layers", {"no_rope_layers": [0, 1]}),
    Case("smollm3", "window", {"use_sliding_window": True, "sliding_window": 7} | BIASES),
    Case("glm", "interleaved-tied", TIED),
    Case("glm4", "norms-around-sharded", {"attention_bias": True}, "20KB"),
    Case("glm4", "all-dims-turn", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    Case("cohere", "parallel", BIASES | {"logit_scale": 2.0}),
    Case("cohere2", "window-sharded", {"logit_scale": 2.0}, "20KB"),
    Case("gemma2", "caps-sharded", {}, "20KB"),
    Case("gemma2", "no-caps-untied", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    Case("gemma3_text", "two-ropes-sharded", ropes(rope_type="linear", factor=8.0), "20KB"),
    Case("gemma4_text", "vectors-and-shared-keys-sharded", {}, "20KB"),
    Case("gemma4_text", "keys-are-values", GEMMA4_LARGE | TIED),
    Case("gemma4_text", "odd-heads-biases", {"head_dim": 10, "global_head_dim": 22, "attention_bias": True}),
    Case("gemma4_unified_text", "keys-are-values-sharded", {}, "20KB"),
    Case("gemma4_unified_text", "shared-keys", {"num_kv_shared_layers": 2, "final_logit_softcapping": None} | TIED),
    Case("mixtral", "sharded", {"head_dim": 8}, "20KB"),
    Case("mixtral", "window", {"sliding_window": 6}),
    Case("qwen2_moe", "shared-expert", {}),
    Case("qwen2_moe", "window-sharded", {"use_sliding_window": True, "sliding_window": 7}, "20KB"),
    Case("qwen3_moe", "window", {"use_sliding_window": True, "sliding_window": 7, "norm_topk_prob": False}),
    Case("qwen3_moe", "one-plain-layer-sharded", {"mlp_only_layers": [0]}, "20KB"),
    Case("gpt_oss", "sinks-sharded", rope("yarn", factor=4.0, original_max_position_embeddings=128), "20KB"),
    Case("deepseek_v2", "groups-sharded", {"topk_method": "group_limited_greedy"} | BIASED, "20KB"),
    Case("deepseek_v2", "one-product-of-queries", {"q_lora_rank": None, "qk_nope_head_dim": 24, "v_head_dim": 6}),
    Case("deepseek_v2", "dense-yarn", {"first_k_dense_replace": 2, "mlp_bias": False} | DEEPSEEK_YARN),
    Case("deepseek_v3", "groups-sharded", BIASED, "20KB"),
    Case("deepseek_v3", "one-product-yarn", {"q_lora_rank": None, "kv_lora_rank": 32} | DEEPSEEK_YARN),
    Case("deepseek_v3", "halves-turn", {"rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 22}),
    Case("sarvam_mla", "one-product", {}),
    Case("glm4_moe_lite", "layers-in-turns", {"v_head_dim": 18}),
    Case("youtu", "dense-tied", TIED),
    Case("minicpm3", "scaled-tied", TIED | {"mlp_bias": True}),
    Case("minicpm3", "longrope", LONGROPE_OF_MINICPM),
    Case("deepseek_v32", "groups-sharded", BIASED, "20KB"),
    # Expanded over chosen positions, up to 8 times as many.
    Case("deepseek_v32", "long-yarn", {"index_topk": 40, "index_head_dim": 8} | DEEPSEEK_YARN),
    Case("glm_moe_dsa", "shared-choice", {}),
    Case("glm_moe_dsa", "long-own-choices", {"index_topk": 60, "indexer_types": ["full", "full"]}),
]
_FIRST = {case.family: case for case in reversed(CASES)}
# The ordinary run has the first case of each family.
FIRST_CASES = [case if case is _FIRST[case.family] else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
# Models of the greedy test: each family once plain enough to be fast, together covering every feature.
GREEDY = [
    Case("llama", "llama3-rope", {"rope_parameters": LLAMA3_ROPE}),
    Case("qwen2", "tied-mixed-window-sharded", TIED | MIXED_WINDOW, "20KB"),
    Case("qwen3", "mha-tied", MHA | TIED),
    Case("mistral", "window", {"sliding_window": 33}),
    Case("gemma2", "caps", {}),
    Case("gemma4_text", "vectors-and-shared-keys", {}),
    Case("qwen3_moe", "experts", {}),
    Case("deepseek_v3", "latent", {}),
    Case("glm_moe_dsa", "chosen", {}),
    Case("qwen3_5_text", "states", {}),
]
_MORE = ("phi3", "granite", "olmo2", "olmo3", "smollm3", "glm", "glm4", "cohere", "cohere2", "gemma3_text")
_LATENT = ("deepseek_v2", "glm4_moe_lite", "youtu", "minicpm3", "deepseek_v32")
_DELTA = ("qwen3_5_moe_text", "qwen3_next")
ALL_GREEDY = [
    *GREEDY,
    *(
        pytest.param(Case(family, "greedy", {}), marks=pytest.mark.slow)
        for family in (*_MORE, "mixtral", "qwen2_moe", "gpt_oss", *_LATENT, *_DELTA)
    ),
    # Each row has all experts: a near tie of two would decide more than the format.
    pytest.param(Case("sarvam_mla", "greedy", {"num_experts_per_tok": 8}), marks=pytest.mark.slow),
]


def _name(case: Case) -> str:
    return f"{case.family}-{case.name}"


def _checkpoint(folder: Path, case: Case, **options: Any) -> Path:
    return tiny_checkpoint(folder, case.family, max_shard_size=case.max_shard_size, **options, **case.config)


def _prompts(count: int, low: int, high: int, seed: int = 1) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(source.randint(low, high))] for _ in range(count)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", FIRST_CASES, ids=_name)
def test_logits_of_chunked_mixed_batches_equal_transformers(tmp_path: Path, case: Case) -> None:
    folder = _checkpoint(tmp_path, case)
    reference = reference_model(folder)
    driver = PagedDriver(load_model(folder, device=cpu_device()), num_blocks=200, block_size=5)
    sequences = [PagedSequence(ids) for ids in [*_prompts(4, 1, 60), *_prompts(1, 90, 90)]]
    driver.prefill(sequences, max_chunk=23)
    for sequence in sequences:
        with torch.no_grad():
            expected = reference(torch.tensor([sequence.token_ids])).logits[0]
        assert (torch.stack(sequence.logits) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        case if case is _FIRST[case.family] else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
        if case.family in LATENT_TYPES and "longrope" not in case.name
    ],
    ids=_name,
)
def test_logits_of_expanded_prompts_equal_transformers(tmp_path: Path, case: Case) -> None:
    folder = _checkpoint(tmp_path, case)
    reference = reference_model(folder)
    driver = PagedDriver(load_model(folder, device=cpu_device()), num_blocks=300, block_size=5)
    # Long chunks beside short ones and decode steps, from the first token on and after others.
    sequences = [PagedSequence(ids) for ids in [*_prompts(1, 300, 300), *_prompts(1, 170, 170), *_prompts(2, 1, 9)]]
    driver.step([(sequences[0], LEAST_ROWS), (sequences[2], 1)])
    driver.step([(sequences[1], 170), (sequences[0], LEAST_ROWS + 3), (sequences[3], 1)])
    driver.prefill(sequences, max_chunk=17)
    for sequence in sequences:
        with torch.no_grad():
            expected = reference(torch.tensor([sequence.token_ids])).logits[0]
        assert (torch.stack(sequence.logits) - expected).abs().max() < TOLERANCE


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", FIRST_CASES, ids=_name)
def test_logits_of_decode_steps_equal_transformers(tmp_path: Path, case: Case) -> None:
    folder = _checkpoint(tmp_path, case)
    reference = reference_model(folder)
    driver = PagedDriver(load_model(folder, device=cpu_device()), num_blocks=200, block_size=4)
    sequences = [PagedSequence(ids) for ids in _prompts(6, 2, 30)]
    while pending := [sequence for sequence in sequences if sequence.left]:
        driver.step([(sequence, 1) for sequence in pending])
    for sequence in sequences:
        with torch.no_grad():
            expected = reference(torch.tensor([sequence.token_ids])).logits[0]
        assert (torch.stack(sequence.logits) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ALL_GREEDY, ids=_name)
def test_greedy_ids_equal_generate(tmp_path: Path, case: Case) -> None:
    folder = _checkpoint(tmp_path, case)
    reference = reference_model(folder)
    reference.generation_config.eos_token_id = None
    prompts = _prompts(NUM_PROMPTS, 1, 48)
    driver = PagedDriver(load_model(folder, device=cpu_device()), num_blocks=NUM_PROMPTS * 38, block_size=3)
    found = driver.greedy(prompts, NEW_TOKENS, max_chunk=13)
    for prompt, ids in zip(prompts, found, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", ALL_GREEDY, ids=_name)
def test_a_sequence_hardly_depends_on_its_batch(tmp_path: Path, case: Case) -> None:
    model = load_model(_checkpoint(tmp_path, case), device=cpu_device())
    prompts = _prompts(8, 1, 80)
    together = [PagedSequence(ids) for ids in prompts]
    PagedDriver(model, num_blocks=200, block_size=4).prefill(together, max_chunk=19)
    for prompt, batched in zip(prompts, together, strict=True):
        alone = PagedSequence(prompt)
        PagedDriver(model, num_blocks=100, block_size=16).step([(alone, len(prompt))])
        # By torch's operators runs of rows of a delta rule are other sums than rows one by one.
        most = 10 * TOLERANCE if case.family in DELTA_TYPES else BATCH_TOLERANCE
        assert (torch.stack(alone.logits) - torch.stack(batched.logits)).abs().max() < most


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ALL_GREEDY, ids=_name)
def test_half_precision_is_as_near_to_float32_as_transformers(tmp_path: Path, case: Case, dtype: str) -> None:
    folder = _checkpoint(tmp_path, case)
    exact = reference_model(folder)
    rounded = reference_model(folder, getattr(torch, dtype))
    driver = PagedDriver(load_model(folder, device=cpu_device(), dtype=dtype), num_blocks=100, block_size=8)
    sequences = [PagedSequence(ids) for ids in _prompts(4, 20, 60)]
    driver.prefill(sequences, max_chunk=32)
    ours, theirs = 0.0, 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence.token_ids])
        with torch.no_grad():
            expected, reference = exact(ids).logits[0], rounded(ids).logits[0].float()
        ours += float((torch.stack(sequence.logits) - expected).square().mean())
        theirs += float((reference - expected).square().mean())
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=_name)
def test_rope_written_the_old_way_means_the_same(tmp_path: Path, case: Case) -> None:
    folder = _checkpoint(tmp_path, case)
    sequence, again = PagedSequence(_prompts(1, 60, 60)[0]), PagedSequence(_prompts(1, 60, 60)[0])
    PagedDriver(load_model(folder, device=cpu_device()), num_blocks=20, block_size=4).prefill([sequence], 60)
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    (folder / "config.json").write_text(json.dumps(config))
    PagedDriver(load_model(folder, device=cpu_device()), num_blocks=20, block_size=4).prefill([again], 60)
    assert torch.equal(torch.stack(sequence.logits), torch.stack(again.logits))
