"""Facts of a GGUF file: whole numbers, numbers, lists with an entry a layer; and the fields of config.json they become.

A fact's name here is what follows the architecture's name and a dot. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.common.gguf_file import GgufFile

# Numbers of config.json are 32 bits on the wire.
MOST_WHOLE = 2**31 - 1
FULL, SLIDING = "full_attention", "sliding_attention"
# No model has more, and there are lists with an entry a layer.
_MOST_LAYERS = 10_000
# Most characters of a fact in an error.
SHOWN_CHARS = 80
# Divisors of frequencies are no smaller.
_LEAST_FACTOR = 1e-3
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
KEY, VALUE = "attention.key_length", "attention.value_length"
NEXT = "nextn_predict_layers"
# Facts that change a model's numbers: a row reads them, or the file is refused.
FOREIGN = (
    "expert_count", "expert_group_count", "expert_weights_scale", "expert_gating_func", "interleave_moe_layer_step",
    WINDOW, "attention.chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping",
    "logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attention.kv_lora_rank",
    "attention.shared_kv_layers", "attention.indexer.head_count", "rope.dimension_sections", "rope.freq_base_swa",
    "rope.scaling.yarn_log_multiplier", "ssm.state_size", "pooling_type", "use_parallel_residual", NEXT,
)  # fmt: skip
# Facts that are 0 where the model has none.
ABSENT_IF_ZERO = frozenset((*FOREIGN, "expert_used_count", "expert_feed_forward_length"))

Config = dict[str, Any]
# (file, the fields that are known) -> more fields. Raises StartupError naming a fact.
Rule = Callable[[GgufFile, Config], Config]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of config.json that a fact holds: a whole number of at least 1, or any number above 0."""

    name: str
    is_whole: bool = True
    is_required: bool = False


def whole(name: str) -> Field:
    """Return a whole number that a file may leave out."""
    return Field(name)


def needed(name: str) -> Field:
    """Return a whole number that a file must have."""
    return Field(name, is_required=True)


def number(name: str) -> Field:
    """Return a number that a file may leave out."""
    return Field(name, is_whole=False)


def is_set(file: GgufFile, fact: str) -> bool:
    """True for a fact that is there, and neither 0 nor false."""
    return bool(file.facts.get(f"{file.architecture}.{fact}"))


def read_field(file: GgufFile, fact: str, one: Field) -> int | float | None:
    """Return the value of a field by its fact; None where the file leaves it out. Raises StartupError."""
    name = f"{file.architecture}.{fact}"
    if not one.is_whole:
        return file.number(name)
    if not one.is_required and file.facts.get(name) == 0 and fact in ABSENT_IF_ZERO:
        return None
    return file.whole(name, least=1, most=_MOST_LAYERS if fact == "block_count" else MOST_WHOLE)


def read_whole(file: GgufFile, fact: str, default: int | None = None, *, least: int = 0) -> int:
    """Return a whole number of the architecture; required without a default."""
    name = f"{file.architecture}.{fact}"
    found = file.whole(name, default, least=least, most=MOST_WHOLE)
    if found is None:
        raise file.error(f"has no {name}")
    return found


def read_number(file: GgufFile, fact: str, default: float) -> float:
    """Return a number of the architecture."""
    found = file.number(f"{file.architecture}.{fact}")
    return default if found is None else found


def read_by_layer(file: GgufFile, fact: str, config: Config, default: int | None = None) -> list[int]:
    """Return a whole number for each layer: a file has one, or an array of them."""
    name, layers = f"{file.architecture}.{fact}", config["num_hidden_layers"]
    value = file.facts.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return [read_whole(file, fact, default)] * layers
    found = file.numbers(name)
    if len(found) < layers or not all(type(one) is int and 0 <= one <= MOST_WHOLE for one in found[:layers]):
        raise file.error(f"has {name} of {len(found)} entries: {layers} layers need whole numbers")
    return list(found[:layers])


def read_layer_types(file: GgufFile, config: Config, *, period: int) -> list[str]:
    """Return the kind of attention of each layer: `period` where the file has no pattern."""
    name = f"{file.architecture}.{PATTERN}"
    value = file.facts.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        turns = read_whole(file, PATTERN, period, least=1)
        slides = [bool((layer + 1) % turns) for layer in range(config["num_hidden_layers"])]
    else:
        slides = [bool(one) for one in read_by_layer(file, PATTERN, config)]
    return [SLIDING if one else FULL for one in slides]


def head_dim_of(config: Config) -> int:
    """Return the dims of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def has_tensor(file: GgufFile, tensor: str) -> bool:
    """True when a layer has this tensor."""
    return any(name.startswith("blk.") and name.split(".", 2)[-1] == tensor for name in file.tensors)


def read_floats(file: GgufFile, name: str, count: int) -> list[float]:
    """Read a tensor of float32. Raises StartupError if it has another type or number."""
    tensor = file.tensors[name]
    size = tensor.end - tensor.begin
    if tensor.type.name != "F32" or size != 4 * count or not size:
        raise file.error(f"has {size} bytes of {name}, a head has {count} frequencies of float32")
    try:
        with tensor.path.open("rb") as opened:
            opened.seek(tensor.begin)
            data = opened.read(size)
    except OSError as error:
        raise file.error(f"cannot be read: {error.strerror}") from error
    found: list[float] = list(memoryview(data).cast("f")) if len(data) == size else []
    if not found or not all(one >= _LEAST_FACTOR for one in found):
        raise file.error(f"has {name} that are not divisors of frequencies")
    return found
