"""Tiny random checkpoints of any model type that transformers knows as a causal language model.

A type's own configuration class says which fields it has: sizes are set by their common names, and lists with an entry
a layer are cut so that every kind of layer stays.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from factories.engine.fake_engine import Answer, engine_config, request, run
from factories.engine.model_engine import model_engine
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.models.language_model import LanguageModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 160
# Types whose states generate() does not sort by beams: they are in modules, or in a list of MiniMax's cache that its
# `reorder_cache` does not know.
_UNSORTED_STATES = ("minimax", "recurrent_gemma")
# Beams of the checks, and tokens of their answers.
_BEAMS, _FEW = 3, 16
# Of the highest score: eight of float32's roundings.
_TIE = 1e-6
LAYERS = 4
_MOST_PARAMETERS = 40_000_000
# Shorter than the prompts of the tests.
WINDOW, CHUNK = 12, 16
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": CHUNK,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 96,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Attention through a narrow projection.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    # Positions that an indexer chooses, fewer than a prompt has. With few heads there would be many ties.
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 24,
    # Others.
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "d_kv": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 1,
    "query_pre_attn_scalar": 16,
    "mlp_bias": True,
    "attention_bias": True,
    "use_sliding_window": True,
    "max_window_layers": 2,
    # Decoders of encoder-decoders.
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    # Encoders that also decode.
    "is_decoder": True,
    "rotary_dim": 8,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "crop_size": 28,
    "patch_size": 14,
    "adapter_in_dim": 32,
    "adapter_out_dim": 64,
    "mlp_layer_types": ["dense"],
}
_AUDIO: Mapping[str, Any] = {
    **_VISION,
    "num_blocks": 1,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 32,
    "bias_max_distance": 16,
    "adapter_input_size": 32,
}
# Fields of single types that no rule gives.
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Layers that see all have other heads; the configuration classes keep these fields under other names.
_GLOBAL = {"global_head_dim": 32, "num_global_key_value_heads": 1}
# Some modules hold time steps to a least in prompts, not in steps: what is computed again would differ. The floor keeps
# the random time steps as long as they would be.
_STEPS = {"time_step_min": 1e-9, "time_step_floor": 0.01}
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
_BYTES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
_BYTES |= {"num_attention_heads": 4}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text": _GLOBAL,
    "gemma4_unified_text": _GLOBAL,
    # Published ones have no biases in MLPs, and experts have none in any.
    "deepseek_v2": {"mlp_bias": False},
    # transformers makes zeros of the padding token's row after it has read it.
    "youtu": {"pad_token_id": None},
    "dots1": _SLIDING,
    "laguna": _SLIDING,
    "mellum": _SLIDING,
    "ministral": _SLIDING,
    "qwen2": _SLIDING,
    "qwen2_moe": _SLIDING,
    # Parts of a head's rotated half, for time, height and width.
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen3": _SLIDING,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": WINDOW},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    # Layers with a state beside layers that attend.
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16, **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2), **_MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_dense_layers": 1},
    "longcat_flash": {"num_layers": LAYERS // 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "state_size": 16, "expand": 2},
    # As published. generate() forgets a window where the first layer keeps a state.
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), "sliding_window": None},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, **_STEPS},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "recurrent_gemma": {"attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        **_DELTA,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "reformer": {"axial_pos_embds": False},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2),
        "mamba_d_state": 16,
        **_STEPS,
    },
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {**_SLIDING, "rope_parameters": _ROPES, "logit_scale": 1.0},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "blt": {
        "patcher_config": _BYTES,
        "encoder_config": {**_BYTES, "hidden_size_global": 128},
        "decoder_config": {**_BYTES, "hidden_size_global": 128},
        "global_config": {**_BYTES, "hidden_size": 128},
        "encoder_hash_byte_group_vocab": 64,
    },
}
# Fields of a text part that follow from the whole.
_OF_WHOLE: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    },
}
# Native types that transformers knows by another name.
_SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
# Wide models of weights as wide as those of narrow ones are too sensitive: a rounding becomes another number on the way
# through layers that run many times.
_SENSITIVE = ("hrm_text",)
# Fields that must fit the hidden size.
_FITTING: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "bamba": lambda hidden: {"mamba_d_head": hidden // 4},
    "granitemoehybrid": lambda hidden: {"mamba_d_head": hidden // 4},
    "dbrx": lambda hidden: {
        "d_model": hidden,
        "ffn_config": {"hidden_size": hidden, "ffn_hidden_size": hidden // 2, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mamba2": lambda hidden: {"head_dim": hidden // 4},
    "helium": lambda hidden: {"head_dim": hidden // 4},
    "xlnet": lambda hidden: {"d_head": hidden // 4},
    "zamba2": lambda hidden: {
        "mamba_headdim": hidden // 4,
        "attention_hidden_size": 2 * hidden,
        "attention_head_dim": hidden // 2,
    },
}


# One of each kind: learned positions; soft caps and windows; sinks; widths that differ; chunks; a window that no
# argument tells; the fused projections of Phi; a head with a scale of its own; an indexer that layers share.
USUAL = ("gpt2", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen2_moe", "phi3", "granite", "hy_v4")
# Models that also see, of which the text part runs; the first one is that of the ordinary run.
SEEING = (
    "mistral3", "internvl", "llava", "qwen2_5_vl", "qwen3_vl", "aria", "aya_vision", "cohere2_vision", "idefics3",
    "kimi_k25", "lfm2_vl", "llava_next", "llava_onevision", "ovis2", "smolvlm", "step3p7", "video_llava", "vipllava",
)  # fmt: skip
# Layers that keep a state: Mamba-2 and a gated delta net beside attention; then the others.
STATEFUL = ("granitemoehybrid", "qwen3_next")
FURTHER_STATEFUL = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
# The others that the fallback runs.
FURTHER = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "beam", "biogpt", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "fuyu", "gemma", "gemma3", "gemma3_text", "gemma3n_text", "gemma4",
    "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2",
    "gpt-sw3", "gpt_bigcode",
    "gpt_neox", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe",
    "kolibri1", "laguna", "lfm2", "llama", "llama4", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder",
    "moss_transcribe_diarize", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "phi4_multimodal", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip

# Encoders that decode, and decoders that attend by themselves; the first ones are those of the ordinary run.
OLD = (
    "bart", "bloom", "gpt_neo", "roformer",
    "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "codegen",
    "data2vec-text", "dbrx", "doge", "electra", "ernie", "falcon", "git", "gpt_neox_japanese", "gptj", "marian",
    "mbart", "megatron-bert", "mpt", "mvp", "openai-gpt", "pegasus", "plbart", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "trocr", "xglm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def _factory(model_type: str) -> Any:
    model_type = _SAME_AS.get(model_type, model_type)
    return AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def model_types() -> tuple[str, ...]:
    """Return every type that transformers maps to a causal language model."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a small configuration of a type; `changes` are fields of its text part."""
    model_type = _SAME_AS.get(model_type, model_type)
    kind = CONFIG_MAPPING[model_type]
    # Some have no standard one without these.
    standard = kind(text_config=dict(_OF_WHOLE[model_type])) if model_type in _OF_WHOLE else kind()
    parts: dict[str, Any] = {}
    if (audio := getattr(standard, "audio_config", None)) is not None:
        parts["audio_config"] = type(audio)(**_small_part(audio, _AUDIO))
    if (vision := getattr(standard, "vision_config", None)) is not None:
        parts["vision_config"] = type(vision)(**_small_part(vision, _VISION))
    name = _text_of(standard)
    if name is None:
        return kind(**_fields(standard, model_type, changes), **parts)
    text = getattr(standard, name)
    parts[name] = type(text)(**_fields(text, text.model_type, {**_OF_WHOLE.get(model_type, {}), **changes}))
    # Ids of images and sounds are beyond the small vocabulary.
    ids = {
        one: VOCAB_SIZE - 1
        for one, value in standard.to_dict().items()
        if one.endswith("token_id") and value is not None
    }
    return kind(**parts, **ids)


def text_part(config: Any) -> Any:
    """Return the part of a configuration that says what the language model is."""
    name = _text_of(config)
    return config if name is None else getattr(config, name)


def _text_of(standard: Any) -> str | None:
    """Return the name of a configuration's text part; None: it is all text."""
    names = ("text_config", "decoder", "generator")
    return next((name for name in names if getattr(standard, name, None) is not None), None)


def _small_part(standard: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an encoder's configuration that `standard` has, by one of their names."""
    known, aliases = standard.to_dict(), standard.attribute_map
    return {one: size for one, size in sizes.items() if one in known or one in aliases}


def _fields(standard: Any, model_type: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    known, aliases = standard.to_dict(), standard.attribute_map
    hidden = changes.get("hidden_size", _SIZES["hidden_size"])
    fitting = _FITTING[model_type](hidden) if model_type in _FITTING else {}
    own = {**_OWN.get(model_type, {}), **fitting, **changes}
    sizes = {**_SIZES, **own}
    # Of a field with two names the one in the file counts.
    fields = {name: value for name, value in sizes.items() if name in known or name in aliases or name in own}
    if "qk_rope_head_dim" in fields:
        # Of the rotated part there; every head has its key and value.
        fields["head_dim"] = fields["qk_rope_head_dim"]
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    layers = getattr(standard, "num_hidden_layers", None)
    for name, value in known.items():
        if isinstance(value, list) and layers and len(value) == layers and name not in sizes:
            fields[name] = list(_cut(value))
    return fields


def _cut(values: list[Any]) -> Iterator[Any]:
    """Yield as many values as there are layers, every one of them at least once where there is room."""
    kinds = list(dict.fromkeys(map(str, values)))
    if len(kinds) == 1:
        yield from values[:1] * LAYERS
        return
    by_name = {str(value): value for value in values}
    for place in range(LAYERS):
        yield by_name[kinds[place % len(kinds)]]


def tiny_model_type(
    folder: Path, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a random model of a type to `folder` and return it. Weights are wide: ids vary, and are no ties."""
    config = tiny_config(model_type, **changes)
    spread = 0.2 * (64 / config.hidden_size) ** 0.5 if model_type in _SENSITIVE else 0.2
    with torch.device("meta"):
        empty = _factory(model_type).from_config(config, attn_implementation="eager")
    if (count := sum(parameter.numel() for parameter in empty.parameters())) > _MOST_PARAMETERS:
        raise ValueError(f"{model_type} has {count} parameters: give it sizes of its own")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _factory(model_type).from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, spread)
                elif "norm" in name and name.endswith("weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder)
    if model_type in _SAME_AS:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}), encoding="utf-8")
    return folder


def reference_of(folder: Path) -> PreTrainedModel:
    """Load a checkpoint in transformers, in float32, as `generate` would run it."""
    values = json.loads((folder / "config.json").read_text())
    model_type, options = values["model_type"], {}
    if model_type in _SAME_AS:
        known = _SAME_AS[model_type]
        options["config"] = CONFIG_MAPPING[known].from_dict({**values, "model_type": known})
    model: PreTrainedModel = _factory(model_type).from_pretrained(folder, dtype=torch.float32, **options).eval()
    # It would go before the settings of a call.
    model.generation_config = GenerationConfig()
    return model


def _part_at_a_tie(reference: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """True if answers part where the scores of both next ids are as near as float32's roundings: what a pass sums in
    another order then decides. Scores are those of the whole text in float64."""
    differs = [place for place, both in enumerate(zip(ours, theirs, strict=False)) if both[0] != both[1]]
    if not differs:
        return False
    place = differs[0]
    with torch.no_grad():
        scores = copy.deepcopy(reference).double()(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
    gap = (scores[ours[place]] - scores[theirs[place]]).abs().item()
    return gap <= _TIE * scores.abs().max().item()


def check_ids(folder: Path, model: LanguageModel, new_tokens: int = 64) -> None:
    """Check that ids equal generate()'s: alone, beside others in chunks, after preemption, over cached prefixes, and by
    beams. Sequences that are drawn from one prompt are the same alone and beside others."""
    source = random.Random(5)
    long = [source.randrange(3, VOCAB_SIZE) for _ in range(41)]
    short = [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 17)]
    prompts = [long, *short, long[:24], [*long[:30], 7, 9]]
    reference = reference_of(folder)
    # Its modules keep the states of the prompt before.
    keeps_states = reference.config.model_type == "recurrent_gemma"
    wanted: dict[str, list[list[int]]] = {
        str(place): [greedy_ids(reference_of(folder) if keeps_states else reference, one, new_tokens)]
        for place, one in enumerate(prompts)
    }

    def greedy() -> list[Request]:
        return [
            request(prompt, max_new_tokens=new_tokens, request_id=str(place)) for place, prompt in enumerate(prompts)
        ]

    few = min(new_tokens, _FEW)

    common: dict[str, Any] = {"max_new_tokens": few, "num_return_sequences": _BEAMS}

    def drawn(seed: int) -> Request:
        return request(short[1][:9], request_id="drawn", do_sample=True, seed=seed, **common)

    def several(seed: int = 7) -> list[Request]:
        return [request(short[1], request_id="beams", mode=BeamOptions(_BEAMS), **common), drawn(seed)]

    alone = run(model_engine(model), greedy()[0])["0"].ids
    assert alone == {0: wanted["0"][0]}, f"alone {alone}, by generate() {wanted['0'][0]}"
    wanted |= {one.request_id: _answers(run(model_engine(model), one)[one.request_id]) for one in several()}
    if reference.config.model_type not in _UNSORTED_STATES:
        by_beams = _beam_ids(reference, short[1], few)
        assert wanted["beams"] == by_beams, f"beams {wanted['beams']}, by generate() {by_beams}"
    # Room for about half of the sequences at full length.
    blocks = sum(len(prompt) + new_tokens for prompt in prompts) // 7
    engine = model_engine(model, engine_config(num_blocks=blocks, max_batch_tokens=20, max_running_sequences=8))
    for _ in range(2):
        found = run(engine, *greedy(), *several())
        if _answers(found["drawn"]) != wanted["drawn"]:
            # Where a draw lies at the boundary of two ids, a rounding decides; those of another seed do not.
            wanted["drawn"] = _answers(run(model_engine(model), drawn(8))["drawn"])
            found["drawn"] = run(engine, *greedy(), *several(8))["drawn"]
        for name, ids in wanted.items():
            is_equal = _answers(found[name]) == ids
            is_tie = name.isdigit() and _part_at_a_tie(reference, prompts[int(name)], found[name].ids[0], ids[0])
            assert is_equal or is_tie, f"{name} together {_answers(found[name])}, by generate() {ids}"
    # Where layers let go what left their window there is room for all (tests/numerics/engine preempts them).
    assert engine.stats.preemptions > 0 or any(group.span for group in engine.config.block_groups)
    assert engine.stats.prefix_hit_tokens > 0


def _answers(answer: Answer) -> list[list[int]]:
    """Return the ids of a request's sequences, in its order."""
    assert answer.finished is not None
    return [answer.ids[one.index] for one in answer.finished.sequences]


def greedy_ids(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return transformers' own greedy ids after one prompt, past any end."""
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=settings,
        )
    return ids[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _beam_ids(model: PreTrainedModel, prompt: list[int], count: int) -> list[list[int]]:
    """Return transformers' own ids of all beams after one prompt, past any end."""
    settings = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        num_beams=_BEAMS,
        num_return_sequences=_BEAMS,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return found[:, len(prompt) :].tolist()  # type: ignore[no-any-return]


def tiny_of(folder: Path, config: Mapping[str, Any], *, vocab_size: int, seed: int = 0) -> Path:
    """Write a random model to `folder` with a published configuration, all of its sizes small, and return it."""
    layers, sizes = config["num_hidden_layers"], {**_SIZES, "vocab_size": vocab_size}
    # As published; these cost nothing.
    kept = {"max_position_embeddings", "sliding_window", "use_sliding_window", "tie_word_embeddings"}
    names = config.keys() - kept - {"query_pre_attn_scalar"}
    small = {name: sizes[name] for name in names & sizes.keys() if config[name] is not None}
    small |= {name: sizes[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        small["num_key_value_heads"] = sizes["num_attention_heads"]
    lists = {
        name: list(_cut(value)) for name, value in config.items() if isinstance(value, list) and len(value) == layers
    }
    # A field that is left out follows from the others, as in the published one.
    values = {**config, **small, **lists}
    kind = CONFIG_MAPPING[config["model_type"]]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fields = {name: value for name, value in values.items() if name not in ("model_type", "torch_dtype")}
        _factory(config["model_type"]).from_config(kind(**fields), dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
