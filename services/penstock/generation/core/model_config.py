"""A checkpoint's config.json, checked, as data. No torch: the servicer reads it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError

CONFIG_FILE = "config.json"
# No model has more. A config.json may say any number, and lists of that length are made before a weight is looked at.
MAX_LAYERS = 10_000
# Sizes and lengths are 32 bits on the wire.
_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, as in transformers 5.x's `rope_parameters`. `rope_type` decides which other fields count."""

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Factor on cos and sin.
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder, the KV pool and GetModelInfo need to know of a checkpoint."""

    model_type: str
    # First of config.json's `architectures`, such as Qwen2ForCausalLM.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # One entry per layer: number of positions that a row sees, itself included; None: all.
    sliding_windows: tuple[int | None, ...]
    # From generation_config.json where it names some, else from config.json.
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    # Number format that config.json names: "float32", "bfloat16", "float16"; None: it names none.
    checkpoint_dtype: str | None
    # Number format of weights, activations and KV in this process; set by the loader.
    dtype: str = ""
    # Number of distinct parameters, tied ones counted once; set by the loader.
    num_parameters: int = 0
    # A quantised checkpoint's format in words; empty: it is not quantised.
    checkpoint_format: str = ""
    # Form that most of its matrices keep, int8 or int4; empty: none.
    kept_form: str = ""
    # Number of its quantised matrices by the form that they run in; set by the loader.
    weight_forms: tuple[tuple[str, int], ...] = ()


class ConfigReader:
    """Typed access to one JSON object; every complaint is a StartupError that names file and field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def error(self, field: str, problem: str) -> StartupError:
        """Return a StartupError that reads `config.json in <folder>: <field> <problem>`."""
        return StartupError(f"{self.source}: {self.prefix}{field} {problem}", flag="MODEL")

    def has(self, field: str) -> bool:
        """True when `field` is present and not null."""
        return self.values.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """Read a whole number in minimum..maximum. Without a default the field is required."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"must be a whole number of at least {minimum}, found {value!r}")
        if value > maximum:
            raise self.error(field, f"must be at most {maximum}")
        return value

    def optional_integer(self, field: str, *, minimum: int = 0) -> int | None:
        """Read a whole number of at least `minimum`; None when absent or null."""
        return self.integer(field, minimum=minimum) if self.has(field) else None

    def number(self, field: str, default: float | None = None) -> float:
        """Read a number above 0. Without a default the field is required."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(field, f"must be a number above 0, found {value!r}")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        """Read true or false."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, found {value!r}")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        """Read a string. Without a default the field is required."""
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, found {value!r}")
        return value

    def mapping(self, field: str) -> ConfigReader | None:
        """Return a reader of a nested object; None when absent or null."""
        if not self.has(field):
            return None
        value = self.values[field]
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, found {value!r}")
        return ConfigReader(value, self.source, f"{self.prefix}{field}.")

    def token_ids(self, field: str) -> tuple[int, ...]:
        """Read a token id or a list of them, without duplicates and in order; () when absent or null."""
        value = self.values.get(field)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in values):
            raise self.error(field, f"must be a token id or a list of them, found {value!r}")
        return tuple(dict.fromkeys(values))

    def _get(self, field: str, default: object) -> object:
        value = self.values.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises StartupError naming the file: missing, unreadable, or not an object."""
    if not path.parent.is_dir():
        raise StartupError(f"{path.parent} is not a folder with a model", flag="MODEL")
    if not path.is_file():
        raise StartupError(f"{path.parent} has no {path.name}: not a Hugging Face model folder", flag="MODEL")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read as JSON: {error}", flag="MODEL") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object", flag="MODEL")
    return value
