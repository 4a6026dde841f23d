"""A GGUF file as a model folder in the cache: config.json and tokenizer from its metadata, beside a link to it.

It is made once for each file (its path, size and modification time); services read it like any other folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.common.dtypes import BY_STORED, COMPUTED
from penstock.common.environment import cache_folder, child_environment
from penstock.common.errors import StartupError
from penstock.common.gguf_file import GgufFile
from penstock.common.logging import get_logger

SUFFIX = ".gguf"
# Name of the link in the folder.
GGUF_FILE = "model.gguf"
# Raise it when the contents of the folder change.
_VERSION = 1
_TOKENIZER_SECONDS = 300
# llama.cpp's architectures, with Hugging Face's names.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_GEMMA3 = "gemma3"
# config.json's fields by the facts after the architecture's name.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_REQUIRED = ("context_length", "embedding_length", "feed_forward_length", "block_count", "attention.head_count")
# Other facts that are whole numbers, and numbers.
_WHOLE = (
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "rope.scaling.original_context_length",
)
_NUMBERS = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor")
# Facts of models that only another implementation of the architecture can serve.
_WINDOW = "attention.sliding_window"
_FOREIGN = ("expert_count", _WINDOW, "attn_logit_softcapping", "final_logit_softcapping", "logit_scale")
# Exceptions by architecture, and their fields in config.json.
_OWN_FIELDS = {_GEMMA3: {_WINDOW: "sliding_window"}}
# Gemma 3's largest model scales its scores by another width than the others; llama.cpp recognises it by its layers.
_GEMMA3_27B_LAYERS = 62
_EMBEDDING, _HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# For Llama 3.1 and later, the only models with frequency factors in their files.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_LEAST_FACTOR, _MOST_FACTOR = 1e-3, 1e6
# Numbers of config.json are 32 bits on the wire.
_MOST_WHOLE = 2**31 - 1
# Most characters of a fact in an error, and of a file's name in its folder's name.
_SHOWN_CHARS, _STEM_CHARS = 80, 100
_log = get_logger("penstock.common")


def gguf_folder(path: Path) -> Path:
    """Return the folder of a file; make it if it does not exist.

    Raises StartupError naming MODEL for a broken file, an unsupported architecture or type, or a cache that cannot be
    written.
    """
    path = path.resolve()
    folder = made_folder(path)
    if folder is not None:
        return folder
    config = config_of(GgufFile(path))
    target = _place(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".gguf-", dir=target.parent))
    except OSError as error:
        raise StartupError(
            f"MODEL {path}: {target.parent}, the place for its config.json, cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can",
            flag="MODEL",
        ) from error
    try:
        _write_tokenizer(path, scratch)
        (scratch / "config.json").write_text(json.dumps(config, indent=2))
        (scratch / GGUF_FILE).symlink_to(path)
        # Another process may have made it meanwhile.
        with contextlib.suppress(OSError):
            os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def made_folder(path: Path) -> Path | None:
    """Return the folder of a file; None if it does not exist."""
    folder = _place(path.resolve())
    return folder if (folder / GGUF_FILE).exists() else None


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json's values. Raises StartupError naming a missing or unsupported fact of the file."""
    facts, name = file.facts, file.architecture
    if name not in _ARCHITECTURES:
        raise file.error(
            f"has general.architecture {name[:_SHOWN_CHARS]!r}, which is not read from GGUF; supported are "
            f"{', '.join(_ARCHITECTURES)}: give the model's safetensors"
        )
    for fact in _REQUIRED:
        if f"{name}.{fact}" not in facts:
            raise file.error(f"has no {name}.{fact}")
    for fact in (*_REQUIRED, *_WHOLE):
        file.whole(f"{name}.{fact}", least=1, most=_MOST_WHOLE)
    for fact in _NUMBERS:
        file.number(f"{name}.{fact}")
    own = _OWN_FIELDS.get(name, {})
    for fact in own:
        file.whole(f"{name}.{fact}", least=1, most=_MOST_WHOLE)
    for fact in _FOREIGN:
        if fact not in own and facts.get(f"{name}.{fact}"):
            raise file.error(f"has {name}.{fact}, which is not read from GGUF: give the model's safetensors")
    if _EMBEDDING not in file.tensors:
        raise file.error(f"has no tensor {_EMBEDDING}")
    model_type, architecture = _ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    fields = {**_FIELDS, **own}
    config |= {field: facts[f"{name}.{fact}"] for fact, field in fields.items() if f"{name}.{fact}" in facts}
    config["vocab_size"] = file.tensors[_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = _HEAD not in file.tensors
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if name == _GEMMA3:
        config |= _gemma3(file, config)
    config |= _rope(file, config)
    ends = [file.whole(f"tokenizer.ggml.{one}_token_id", most=_MOST_WHOLE) for one in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(one for one in ends if one is not None))
    config["bos_token_id"] = file.whole("tokenizer.ggml.bos_token_id", most=_MOST_WHOLE)
    types = [tensor.type.name for tensor in file.tensors.values()]
    counts = {one: types.count(one) for one in sorted(set(types))}
    kinds = [one for one in counts if one != "F32"] or ["F32"]
    # Numbers that are made of blocks have no dtype of their own.
    stored = BY_STORED.get(kinds[0]) if len(kinds) == 1 else None
    config["dtype"] = stored.name if stored is not None and stored.name in COMPUTED else "bfloat16"
    config["quantization_config"] = {"quant_method": "gguf", "types": counts}
    return config


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's fields that llama.cpp has in its code. Raises StartupError naming a missing fact."""
    for fact in (_WINDOW, "attention.key_length"):
        if f"{_GEMMA3}.{fact}" not in file.facts:
            raise file.error(f"has no {_GEMMA3}.{fact}")
    of_hidden = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    width = config["hidden_size"] // config["num_attention_heads"] if of_hidden else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    }


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's fields of the rotary embedding, except its base."""
    name, facts = file.architecture, file.facts
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turned = facts.get(f"{name}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise file.error(f"has {name}.rope.dimension_count {turned}: only a whole head ({head_dim}) is supported")
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise file.error(f"has both {name}.rope.scaling.type and {ROPE_FACTORS}")
        return {"rope_scaling": _llama3(file, config.get("rope_theta", 10_000.0), head_dim)}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise file.error(f"has {name}.rope.scaling.type {kind[:_SHOWN_CHARS]!r}; supported are none, linear, yarn")
    scaling = {"rope_type": kind, "factor": facts.get(f"{name}.rope.scaling.factor", 1.0)}
    original = facts.get(f"{name}.rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 and later that gives these frequency factors."""
    tensor = file.tensors[ROPE_FACTORS]
    size = tensor.end - tensor.begin
    if tensor.type.name != "F32" or size != 4 * (head_dim // 2) or not size:
        raise file.error(f"has {size} bytes of {ROPE_FACTORS}, a head has {head_dim // 2} frequencies of float32")
    try:
        with file.path.open("rb") as opened:
            opened.seek(tensor.begin)
            data = opened.read(size)
    except OSError as error:
        raise file.error(f"cannot be read: {error.strerror}") from error
    factors = memoryview(data).cast("f").tolist() if len(data) == size else []
    if not factors or not all(_LEAST_FACTOR <= found <= _MOST_FACTOR for found in factors):
        raise file.error(f"has {ROPE_FACTORS} that are not divisors of frequencies")
    factor = max(factors)
    for index, found in enumerate(factors):
        turns = _ORIGINAL * theta ** (-2 * index / head_dim) / math.tau
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        if abs(found * ((1 - smooth) / factor + smooth) - 1) > 1e-3:
            raise file.error(f"has {ROPE_FACTORS} of an unknown scaling: give the model's safetensors")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _place(path: Path) -> Path:
    facts = path.stat()
    key = f"{_VERSION} {path} {facts.st_size} {facts.st_mtime_ns}"
    return Path(cache_folder()) / "gguf" / f"{path.stem[:_STEM_CHARS]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with transformers, in a child process since it takes memory.
    Without them a service asks for another folder with the tokenizer."""
    command = [sys.executable, "-m", "penstock.common.gguf_tokenizer", str(path), str(folder)]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, timeout=_TOKENIZER_SECONDS, check=False, text=True
        )
        lines = done.stderr.strip().splitlines()
        cause = "" if done.returncode == 0 else (lines or [f"status {done.returncode}"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        cause = type(error).__name__
    if cause:
        for left in folder.iterdir():
            left.unlink()
        _log.warning(
            "the GGUF file's tokenizer cannot be converted: give a folder with a tokenizer as --tokenizer-path",
            cause=cause[:300],
        )
