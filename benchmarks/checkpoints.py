"""Random-weight checkpoints of real shapes, made on first use outside git, with a tokenizer that every engine loads.

    python -m benchmarks checkpoints qwen2.5-0.5b llama-3.2-1b [--cache DIR]

The weights are transformers' own initialisation (normal, 0.02), so logits are finite and speed is that of the shape.
config.json names no end-of-sequence token: outputs have the length that was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._arguments import at_least, names, refuse
from benchmarks._report import Report

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
# Tokens of a block in engines that a benchmark makes itself.
BLOCK_SIZE = 16
QUANTIZATIONS = ("none", "int8", "int8-groups", "int4")


@dataclass(frozen=True)
class Shape:
    """A family of transformers (`Qwen2` for Qwen2Config) and the fields of its config."""

    family: str
    fields: Mapping[str, Any]


QWEN = Shape(
    "Qwen2",
    {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)
LLAMA = Shape(
    "Llama",
    {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
GEMMA = Shape(
    "Gemma3Text",
    {
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
)
QWEN3 = Shape(
    "Qwen3",
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)
# A layer is Qwen3-30B-A3B's; 4 of 48 layers, and half of its experts.
QWEN_MOE = Shape(
    "Qwen3Moe",
    {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)
# Three layers in four have a gated delta rule in place of attention.
QWEN3_5 = Shape(
    "Qwen3_5Text",
    {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
)
# A layer is DeepSeek-V2-Lite's; 4 of 27 layers, the first of them without experts.
DEEPSEEK = Shape(
    "DeepseekV2",
    {
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 32_768,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
)
# The same with the low rank of DeepSeek-V2's queries: without one llama.cpp takes 26 or 27 layers only.
DEEPSEEK_LOW_RANK = Shape("DeepseekV2", {**DEEPSEEK.fields, "q_lora_rank": 1536})
# Gemma 4 E2B with a quarter of its vocabulary: whole, the embeddings of its layers alone take 4.7 GB.
GEMMA4 = Shape(
    "Gemma4Text",
    {
        "vocab_size": 65_536,
        "vocab_size_per_layer_input": 65_536,
        "hidden_size_per_layer_input": 256,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 32_768,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
)
# A layer is gpt-oss-20b's; 4 of 24 layers, and half of its experts. vLLM starts none without YaRN's fields: a folder
# that was made without them has to be deleted.
GPT_OSS = Shape(
    "GptOss",
    {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
)
SHAPES = {
    "qwen2.5-0.5b": QWEN,
    "llama-3.2-1b": LLAMA,
    "qwen3-0.6b": QWEN3,
    "gemma-3-1b": GEMMA,
    "qwen3-30b-a3b-4l": QWEN_MOE,
    "qwen3.5-0.8b": QWEN3_5,
    "deepseek-v2-lite-4l": DEEPSEEK,
    "deepseek-v2-4l": DEEPSEEK_LOW_RANK,
    "gemma-4-e2b": GEMMA4,
    "gpt-oss-20b-4l": GPT_OSS,
}


def checkpoint(name: str, cache: Path = CACHE, seed: int = 0) -> Path:
    """The folder of the random model `name`, made when it is not there. Raises KeyError for an unknown shape.

    A folder is filled under another name and renamed, so that one cut short is not taken for whole.
    """
    shape = SHAPES[name]
    folder = cache / f"{name}-random-bf16"
    if (folder / "tokenizer.json").is_file():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    _save_weights(shape, unfinished, seed)
    _save_tokenizer(int(shape.fields["vocab_size"]), unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster, or an older version left a folder without a tokenizer
        folder.rename(folder.with_name(f"{unfinished.name}.old"))
        unfinished.rename(folder)
    return folder


def resolve(model: str, cache: Path = CACHE, flag: str = "--model") -> Path:
    """The folder of a shape's name, or `model` itself. Ends the process, naming the flag, when it is neither."""
    if model in SHAPES:
        return checkpoint(model, cache)
    if not (Path(model) / "config.json").is_file():
        refuse(f"{flag} {model}: neither a folder with config.json nor one of {', '.join(SHAPES)}")
    return Path(model)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a benchmark of one model: which, in which formats, on how many threads."""
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a shape's name or a folder")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument(
        "--quantization",
        type=names(QUANTIZATIONS, "format"),
        default="none",
        help=f"of {', '.join(QUANTIZATIONS)}: a list with commas",
    )
    parser.add_argument("--threads", type=at_least(1), default=2)


def _save_weights(shape: Shape, folder: Path, seed: int) -> None:
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{shape.family}Config")(**shape.fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False}) + "\n")


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    """Byte-level BPE without merges: a byte of text is a token, and the other ids are words of four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = "<|endoftext|>"
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < vocab_size - 1:
        vocabulary["Ġ" + _word(len(vocabulary))] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts) + "\n")


def _word(number: int) -> str:
    """Four letters, another for every number below 26⁴."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--cache", type=Path, default=CACHE)


def main(options: argparse.Namespace, _report: Report) -> None:
    """Make what is missing and print where it is."""
    for name in options.names or SHAPES:
        if name not in SHAPES:
            refuse(f"NAME {name}: the shapes are {', '.join(SHAPES)}")
        print(checkpoint(name, options.cache))
