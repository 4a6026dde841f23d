"""Command `penstock inspect`: facts about a model from its files, without loading it, and its needs on this machine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from penstock.cli.console import say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.cli.inspect_cache import (
    context_bytes,
    group_lines,
    index_key_numbers,
    kv_groups,
    layer_sights,
    shapes_of,
)
from penstock.cli.inspect_drafts import drafts_line, has_known_layout, trained_drafts
from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.dtypes import COMPUTED, dtype_name
from penstock.common.errors import StartupError
from penstock.common.gguf_parts import GGUF_FILE, read_gguf
from penstock.common.options import option, options_of
from penstock.common.units import format_size
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.latent_heads import LATENT_TYPES
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.host.memory import host_memory
from penstock.generation.weights.files import PACKED_FILE, StoredTensor, file_names, read_header

EPILOG = f"""Reads the configuration, the tokenizer and the headers of the weights, also for model types that
do not start here. For a hub id that is not in the cache, only these are fetched. Speeds are estimates.

{ENV_NOTE}

Examples:

  penstock inspect ./my-model

  penstock inspect Qwen/Qwen2.5-0.5B-Instruct

  penstock inspect ./my-model --json"""
GROUP = "Inspect"
# Files that describe a model, without its weights.
SMALL_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt")
QUANTIZATIONS = ("none", "int8", "int8-groups", "int4")
# Bytes of a weight with its part of the scales.
_QUANTISED_BYTES = {"int8": 1.0, "int8-groups": 1.0625, "int4": 0.5625}
# Names that families use for one thing, in the order in which they are tried.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "experts_per_token")
# Parts of the names of types with a state in place of keys and values in all layers.
_STATES = ("mamba", "rwkv", "xlstm")
_MEASURED_BYTES, _ROUNDS = 256 << 20, 4


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Configuration of `penstock inspect`."""

    json: bool = option(False, "Write all facts as JSON.", group=GROUP, env="PENSTOCK_INSPECT_JSON")
    measure: bool = option(True, "Measure this machine's memory for the estimate of speed (0.3 s).", group=GROUP)
    offline: bool = option(False, "Ask no hub: read what its cache has.", group=GROUP)


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Numbers of weights by their purpose, and the bytes of all files."""

    linear: int
    # Those of `linear` that belong to experts; a token uses some of them.
    experts: int
    table: int
    # 0: the table serves as the head.
    head: int
    rest: int
    stored_bytes: int
    # Number of weights by dtype.
    dtypes: dict[str, int]

    @property
    def count(self) -> int:
        """Number of all weights; for packed formats, of stored numbers."""
        return self.linear + self.table + self.head + self.rest

    def loaded_bytes(self, item: float, quantization: str) -> int:
        """Bytes in memory with `item` bytes a number, or quantised."""
        each = _QUANTISED_BYTES.get(quantization)
        if each is None:
            return int(self.count * item)
        # The head is int8 with either quantization, even when it is the table.
        head = self.head or self.table
        return int(self.linear * each + head * _QUANTISED_BYTES["int8"] + (self.table + self.rest) * item)

    def read_bytes(self, item: float, quantization: str, expert_share: float) -> int:
        """Bytes that a token of one stream reads: all but the table, and only the share of the experts that it uses."""
        used = self.linear - self.experts * (1.0 - expert_share)
        each = _QUANTISED_BYTES.get(quantization, item)
        head = (self.head or self.table) * (item if quantization == "none" else _QUANTISED_BYTES["int8"])
        return int(used * each + head + self.rest * item)


def run_inspect(model: str | None, given: Overrides) -> None:
    """Show a model. Raises StartupError naming MODEL when there is none."""
    from penstock.common.logging import configure_logging

    config = from_env_and_flags(InspectConfig, given)
    # Standard output is for the facts; before this call warnings go there, too.
    configure_logging("inspect", level="warning")
    facts = inspect_model(model, measures=config.measure, offline=config.offline)
    if config.json:
        say(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    for name, value in _lines(facts):
        say(f"{name + ':':<14} {value}")


def inspect_model(model: str | None, *, measures: bool = True, offline: bool = False) -> dict[str, Any]:
    """Return all facts about a model, in JSON's types. Raises StartupError naming MODEL when there is none."""
    folder = resolve_model(model, offline=offline, files=SMALL_FILES)
    values = _json(folder / "config.json")
    # The text part's configuration, for a model of several parts.
    text = next((values[name] for name in ("text_config", "llm_config") if isinstance(values.get(name), dict)), values)
    text = {**values, **text}
    headers = _headers(folder, model)
    weights = weights_of(headers, folder)
    item = _serving_item(text)
    shapes = shapes_of(folder)
    # Numbers of a token's keys in each layer that keeps its own, where layers are not all alike.
    widths = tuple(shape.kv_width for shape in shapes if shape.source is None)
    rows, index_keys = int(2 * sum(widths) * item) if widths else _kv_bytes(text), 0
    total, available = host_memory()
    experts, chosen = _first(text, _EXPERTS), _first(text, _CHOSEN)
    packed = (folder / PACKED_FILE).is_file()
    quantized = _quantization(values, packed=packed)
    kinds = ("none",) if quantized else QUANTIZATIONS
    as_stored = (
        _gguf_bytes(headers, item, str(values.get("model_type")))
        if (folder / GGUF_FILE).exists()
        else weights.stored_bytes
    )
    memory = {kind: as_stored if quantized else weights.loaded_bytes(item, kind) for kind in kinds}
    context = _first(text, _CONTEXT)
    layers = (len(widths) or _attention_layers(text)) if rows else None
    sights = layer_sights(text, _first(text, _LAYERS) or 0) if layers else []
    if shapes:
        sights = [sight for sight, shape in zip(sights, shapes, strict=False) if shape.source is None]
    if rows is None or not layers or len(sights) != layers:
        groups, whole = [], None if rows is None or context is None else rows * context
    else:
        each = int(2 * max(widths) * item) if widths else rows // layers
        index_keys = int(index_key_numbers(text, layers) * item)
        groups = kv_groups(sights, each, widths)
        whole = None if context is None else context_bytes(sights, each, context, widths=widths) + index_keys * context
    facts: dict[str, Any] = {
        "model": model_name(model),
        "folder": str(folder),
        "model_type": values.get("model_type"),
        "architectures": _names(values),
        "kind": _kind(values),
        # In other formats than GGUF, numbers are stored packed.
        "parameters": None if quantized and quantized["method"] != "gguf" else weights.count or None,
        "stored": {"bytes": weights.stored_bytes, "dtypes": weights.dtypes},
        "dtype": _dtype(text),
        "quantization": quantized,
        "layers": _first(text, _LAYERS),
        "hidden_size": _first(text, _WIDTH),
        "experts": None if experts is None else {"total": experts, "used_per_token": chosen},
        "context": context,
        "kv_bytes_per_token": None if rows is None else rows + index_keys,
        # Of these: keys by which sparse attention chooses positions.
        "kv_index_bytes_per_token": index_keys,
        # By the positions that layers read: a layer with a window keeps only that.
        "kv_groups": groups,
        "sliding_window": text.get("sliding_window"),
        "drafts": trained_drafts(values, headers),
        **_tokenizer_facts(folder, text),
        "memory": {
            "weights_bytes": memory,
            "context_bytes": whole,
            "available_bytes": available,
            "total_bytes": total,
        },
    }
    facts["starts"], facts["why"], facts["advice"] = _start(folder, values, weights, facts)
    if (drafts := facts["drafts"]) is not None and drafts["is_model"]:
        # By the native route.
        drafts["usable"] = facts["starts"] and not facts["why"] and has_known_layout(values, headers)
    share = 1.0 if not experts or not chosen else min(chosen / experts, 1.0)
    read = {kind: as_stored if quantized else weights.read_bytes(item, kind, share) for kind in kinds}
    facts["speed"] = _speed(read) if measures and weights.count else None
    return facts


def weights_of(tensors: Mapping[str, StoredTensor], folder: Path) -> WeightCounts:
    """Sort tensors by their purpose. Without tensors, as for pickle files, only the bytes are known."""
    counts = {"linear": 0, "experts": 0, "table": 0, "head": 0, "rest": 0}
    dtypes: dict[str, int] = {}
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape)
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + size
        is_table = any(
            part in name for part in ("embed_tokens", "word_embeddings", ".wte.", "embed_in", "tok_embeddings")
        )
        is_head = "lm_head" in name or name.startswith(("output.", "embed_out"))
        kind = "rest" if len(tensor.shape) < 2 else "table" if is_table else "head" if is_head else "linear"
        counts[kind] += size
        counts["experts"] += size if kind == "linear" and ".experts." in name else 0
    files = [path for pattern in ("*.safetensors", "*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern)]
    stored = sum(tensor.end - tensor.begin for tensor in tensors.values())
    return WeightCounts(**counts, stored_bytes=stored or sum(path.stat().st_size for path in files), dtypes=dtypes)


def _headers(folder: Path, model: str | None) -> dict[str, StoredTensor]:
    """Read the headers of the weights from files here, else from the hub. Raises StartupError naming MODEL."""
    if (folder / GGUF_FILE).exists():
        return _gguf_headers(folder)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / PACKED_FILE).is_file():
        files = [folder / PACKED_FILE]
    found: dict[str, StoredTensor] = {}
    for path in files:
        try:
            found |= read_header(path)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StartupError(f"MODEL: {path} has no header of safetensors", flag="MODEL") from error
    if files or model is None or Path(model).expanduser().is_dir():
        return found
    return _headers_at_the_hub(model)


def _gguf_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the header of a GGUF file: types in place of dtypes, and names that `weights_of` knows."""
    found = read_gguf(folder / GGUF_FILE).tensors.items()
    names = {"token_embd.": "embed_tokens.", "_exps.": ".experts."}
    return {
        reduce(lambda text, one: text.replace(*one), names.items(), name): StoredTensor(
            tensor.type.name, tensor.shape, tensor.begin, tensor.end
        )
        for name, tensor in found
    }


def _gguf_bytes(tensors: Mapping[str, StoredTensor], item: float, model_type: str) -> int:
    """Return the bytes in memory of a GGUF file's tensors: as they are stored where a native family keeps their type,
    else with `item` bytes a number."""
    # Imports torch.
    from penstock.generation.layers.linear.gguf_blocks import BLOCK_TYPES
    from penstock.generation.models.registry import supported_model_types

    kept = BLOCK_TYPES if model_type in supported_model_types() else ()
    # Beside a head of its own a table is numbers.
    table = "embed_tokens.weight" if "output.weight" in tensors else ""
    return sum(
        one.end - one.begin if one.dtype in kept and name != table else int(math.prod(one.shape) * item)
        for name, one in tensors.items()
    )


def _headers_at_the_hub(model: str) -> dict[str, StoredTensor]:
    """Read the headers of a hub's files by ranges; empty if the hub cannot serve them, or without safetensors."""
    from huggingface_hub import HfApi

    repo, _, revision = model.partition("@")
    try:
        metadata = HfApi().get_safetensors_metadata(repo, revision=revision or None)
    except Exception:  # of the connection or the repository; the classes differ between releases
        return {}
    return {
        name: StoredTensor(tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


# Configuration.


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty without a file. Raises StartupError for a file that is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"MODEL: {path} cannot be read as JSON", flag="MODEL") from error
    return value if isinstance(value, dict) else {}


def _first(values: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the first of these fields with a whole number above 0."""
    found = (values.get(name) for name in names)
    return next((one for one in found if isinstance(one, int) and not isinstance(one, bool) and one > 0), None)


def _names(values: Mapping[str, Any]) -> list[str]:
    named = values.get("architectures")
    return [str(one) for one in named] if isinstance(named, list) else []


def _kind(values: Mapping[str, Any]) -> str:
    if values.get("is_encoder_decoder"):
        return "encoder-decoder"
    names = _names(values)
    if any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names):
        return "decoder"
    return "no generator" if names else "unknown"


def _dtype(values: Mapping[str, Any]) -> str | None:
    named = values.get("dtype") or values.get("torch_dtype")
    return None if named is None else dtype_name(named)


def _serving_item(values: Mapping[str, Any]) -> float:
    """Bytes of a number as --dtype auto has it."""
    dtype = COMPUTED.get(_dtype(values) or "")
    return 4.0 if dtype is None else dtype.num_bytes


def _kv_bytes(values: Mapping[str, Any]) -> int | None:
    """Bytes of a token's keys and values over all layers; None if the configuration does not say."""
    heads, width = (_first(values, names) for names in (_HEADS, _WIDTH))
    layers = _attention_layers(values)
    if not layers or not heads or not width:
        return None
    latent = _first(values, ("kv_lora_rank",))
    if latent:
        # Multi-head latent attention: one row for all heads, or, in the fallback, keys and values of every head.
        turned = _first(values, ("qk_rope_head_dim",)) or 0
        if values.get("model_type") in LATENT_TYPES and _method(values) != "gguf":
            return int(layers * (latent + turned) * _serving_item(values))
        key = (_first(values, ("qk_nope_head_dim",)) or 0) + turned
        return int(layers * heads * (key + (_first(values, ("v_head_dim",)) or key)) * _serving_item(values))
    own = _first(values, ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")) or heads
    if values.get("multi_query") is True:
        own = 1
    dim = _first(values, ("head_dim", "attention_head_dim", "kv_channels")) or width // heads
    return int(layers * 2 * own * dim * _serving_item(values))


def _method(values: Mapping[str, Any]) -> object:
    """Return the method of a quantised checkpoint; None for another."""
    found = values.get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None


def _attention_layers(values: Mapping[str, Any]) -> int | None:
    """Number of layers with keys and values; None if the configuration does not say, 0 for a state-space model."""
    if any(part in str(values.get("model_type")) for part in _STATES):
        return 0
    kinds = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(kinds, list):
        names = [str(kind) for kind in kinds]
        return sum(name == "hybrid" or ("attention" in name and "linear" not in name) for name in names)
    layers, period = _first(values, _LAYERS), _first(values, ("full_attention_interval",))
    # Of Qwen3-Next and Qwen3.5: other layers keep a state.
    return layers if layers is None or period is None else layers // period


def _quantization(values: Mapping[str, Any], *, packed: bool) -> dict[str, Any] | None:
    """Return the method and bits of a quantised checkpoint; None for another."""
    if packed:
        return {"method": "penstock pack"}
    found = values.get("quantization_config") or values.get("compression_config")
    if not isinstance(found, dict):
        return None
    bits = found.get("bits") or (8 if found.get("load_in_8bit") else 4 if found.get("load_in_4bit") else None)
    return {"method": str(found.get("quant_method", "unknown")), "bits": bits}


def _tokenizer_facts(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer, settings = _json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json")
    model, listed = tokenizer.get("model"), tokenizer.get("added_tokens")
    found = model.get("vocab") if isinstance(model, dict) else None
    words = found if isinstance(found, dict | list) else ()
    added = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    is_mapping = isinstance(words, dict)
    ids = {str(one.get("id")) for one in added if str(one.get("content")) not in words} if is_mapping else set()
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    named = {role: settings.get(role) for role in roles if settings.get(role)}
    special = {role: str(one.get("content") if isinstance(one, dict) else one) for role, one in named.items()}
    generation = _json(folder / "generation_config.json")
    template = settings.get("chat_template")
    has_file = (folder / "chat_template.jinja").is_file() or (folder / "additional_chat_templates").is_dir()
    return {
        "vocab_size": _first(values, ("vocab_size",)),
        "tokenizer_tokens": len(words) + len(ids) or None,
        "special_tokens": special,
        "control_tokens": sum(bool(one.get("special")) for one in added),
        "eos_token_id": generation.get("eos_token_id", values.get("eos_token_id")),
        "chat_template": bool(template) or has_file,
        "template_shows_tools": _shows_tools(folder) if template or has_file else None,
    }


def _shows_tools(folder: Path) -> bool | None:
    """True when the chat template shows tools, or refuses them; None when that is unknown."""
    from penstock.tokenizer.config import TokenizerConfig
    from penstock.tokenizer.tools_shown import folder_hides_tools

    hides = asyncio.run(folder_hides_tools(folder, TokenizerConfig()))
    return None if hides is None else not hides


# Here.


_BY_FALLBACK = "by transformers' modules: the start checks its attention first (--model-route, --self-check)"


def _start(
    folder: Path, values: Mapping[str, Any], weights: WeightCounts, facts: Mapping[str, Any]
) -> tuple[bool, str, list[str]]:
    """Return whether the model starts here (True or False), the reason or the route, and the remedies."""
    if (drafts := facts["drafts"]) is not None and not drafts["is_model"]:
        return (
            False,
            "it is a draft head, not a model",
            ["the model that it was trained for, with it as --draft-head"],
        )
    if not list(folder.glob("*.safetensors")) and not weights.dtypes and not (folder / GGUF_FILE).exists():
        try:
            file_names(folder)
        except StartupError as error:
            return False, error.message, ["save it again with transformers' save_pretrained()"]
    # Imports torch.
    from penstock.generation.models.registry import read_model_config
    from penstock.generation.startup.vocabulary import read_token_tables

    try:
        config = read_model_config(folder)
    except StartupError as error:
        return False, error.message, _advice(values)
    try:
        # The tokenizer's files of a hub's model are not fetched.
        if (folder / "tokenizer.json").is_file():
            read_token_tables(folder, config)
    except StartupError as error:
        return False, error.message, ["this model's own tokenizer files, beside its weights"]
    memory = facts["memory"]
    for kind, needed in memory["weights_bytes"].items():
        if needed < memory["available_bytes"]:
            flag = [] if kind == "none" else [f"--quantization {kind}"]
            if not flag:
                return True, _way(config), []
            short = f"its weights take {format_size(memory['weights_bytes']['none'])} of memory"
            return False, f"{short}, and {format_size(memory['available_bytes'])} is free", flag
    least = min(memory["weights_bytes"].values())
    return (
        False,
        f"its weights take {format_size(least)} at least, and {format_size(memory['available_bytes'])} is free",
        ["a machine with more memory, or a smaller model"],
    )


def _way(config: ModelConfig) -> str:
    """Return the route as text; empty for the native one."""
    if config.route != "fallback":
        return ""
    return f"{_BY_FALLBACK}, for {config.route_reason}" if config.route_reason else _BY_FALLBACK


def _advice(values: Mapping[str, Any]) -> list[str]:
    """Return remedies for a model that is refused for its configuration."""
    if values.get("is_encoder_decoder"):
        return ["none: the engine is for decoders; transformers itself runs encoder-decoder models"]
    found = []
    flags = {bound.name: bound.flag for bound in options_of(GenerationServiceConfig)}
    if values.get("auto_map") and "trust_remote_code" in flags:
        found.append(f"{flags['trust_remote_code']}: the model's own code is in its folder")
    if values.get("quantization_config"):
        found.append("the checkpoint before its quantization, with --quantization int8 or int4")
    known, release = _known_types()
    model_type, written_by = str(values.get("model_type")), values.get("transformers_version")
    if model_type not in known and not values.get("auto_map"):
        newer = f">={written_by}" if written_by else ""
        found.append(f"transformers{newer}: the installed {release} does not know model_type {model_type!r}")
    elif model_type in known:
        found.append(f"a release of Penstock that has the family {model_type!r}; transformers {release} runs it")
    return found


def _known_types() -> tuple[frozenset[str], str]:
    """Return the model types of the installed transformers, and its release."""
    import transformers

    types = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    return frozenset(types), transformers.__version__


def _speed(read: Mapping[str, int]) -> dict[str, Any]:
    """Estimate tokens a second of one stream: the memory's bandwidth over the bytes that a token reads."""
    bandwidth = measured_bandwidth()
    return {
        "is_estimate": True,
        "memory_bytes_per_second": round(bandwidth),
        "read_bytes_per_token": dict(read),
        "tokens_per_second": {kind: round(bandwidth / size, 1) for kind, size in read.items() if size},
    }


def measured_bandwidth(size: int = _MEASURED_BYTES, rounds: int = _ROUNDS) -> float:
    """Measure the bytes a second that this machine reads with all threads: the best of some sums over `size` bytes."""
    import torch

    values = torch.ones(size // 4, dtype=torch.float32)
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        values.sum().item()
        best = min(best, time.perf_counter() - began)
    return size / best


# Text.


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the facts for people."""
    architectures = ", ".join(facts["architectures"])
    yield "model", f"{facts['model']} ({facts['model_type']}{f', {architectures}' if architectures else ''})"
    yield "kind", facts["kind"]
    stored = facts["stored"]
    dtypes = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in stored["dtypes"].items())
    count = "" if facts["parameters"] is None else f"{facts['parameters'] / 1e6:.1f} M, "
    yield "parameters", f"{count}{format_size(stored['bytes'])} stored{f' ({dtypes})' if dtypes else ''}"
    if facts["experts"]:
        yield "experts", f"{facts['experts']['used_per_token'] or '?'} of {facts['experts']['total']} a token"
    quantized = facts["quantization"]
    shown = "none" if quantized is None else " ".join(str(one) for one in quantized.values() if one)
    yield "dtype", f"{facts['dtype'] or 'not named'}, quantization {shown}"
    window = f", sliding window {facts['sliding_window']}" if facts["sliding_window"] else ""
    yield "context", f"{facts['context'] or 'not named'}{window}"
    if facts["kv_bytes_per_token"]:
        all_bytes, index_keys = facts["kv_bytes_per_token"], facts["kv_index_bytes_per_token"]
        halved = f"of {format_size(all_bytes - index_keys)}" if index_keys else "of that"
        yield "KV", f"{format_size(all_bytes)} a token; half {halved} or less with --kv-cache-dtype int8"
    if facts["kv_index_bytes_per_token"]:
        yield "", f"{format_size(facts['kv_index_bytes_per_token'])} of it are index keys, in the model's dtype always"
    if len(facts["kv_groups"]) > 1:
        for text in group_lines(facts["kv_groups"], format_size):
            yield "", text
    if facts["drafts"]:
        yield "drafts", drafts_line(facts["drafts"])
    yield "vocabulary", f"{facts['vocab_size']}, tokenizer {facts['tokenizer_tokens'] or 'missing'}"
    special = ", ".join(f"{role.removesuffix('_token')} {text}" for role, text in facts["special_tokens"].items())
    yield "special", f"{special or 'none'}; {facts['control_tokens']} control tokens, ended by {facts['eos_token_id']}"
    hides = facts["template_shows_tools"] is False
    yield "chat template", "no" if not facts["chat_template"] else "yes, without tools" if hides else "yes"
    memory = facts["memory"]
    each = ", ".join(f"{kind} {format_size(size)}" for kind, size in memory["weights_bytes"].items())
    whole = memory["context_bytes"]
    yield "memory", f"weights: {each}; {format_size(memory['available_bytes'])} is free"
    if whole:
        yield "", f"KV pool: {format_size(whole)} for one sequence of the whole context"
    yield "starts here", ("yes" if facts["starts"] else "no") + (f": {facts['why']}" if facts["why"] else "")
    for text in facts["advice"]:
        yield "what helps", text
    if facts["speed"]:
        speed = facts["speed"]
        rates = ", ".join(f"{kind} {rate:g}" for kind, rate in speed["tokens_per_second"].items())
        measured = format_size(speed["memory_bytes_per_second"])
        yield "speed", f"tokens/s of one stream, at most (an estimate from {measured}/s of memory): {rates}"


def _run(given: Overrides) -> None:
    run_inspect(None if given.get("name") is None else str(given.pop("name")), given)


_MODEL = argument("name", "[MODEL]", "Folder or hub id; the embedded one when left out.")
commands = typer.Typer(add_completion=False)
commands.command("inspect", epilog=EPILOG)(command(options_of(InspectConfig), _run, first=[_MODEL]))
