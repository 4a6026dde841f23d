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
SHAPES = {
    "qwen2.5-0.5b": QWEN,
    "llama-3.2-1b": LLAMA,
    "qwen3-0.6b": QWEN3,
    "gemma-3-1b": GEMMA,
    "qwen3-30b-a3b-4l": QWEN_MOE,
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
