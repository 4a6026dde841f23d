"""A checkpoint's config.json, checked, as data. No torch: the servicer reads it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError
from penstock.generation.core.delta_heads import DeltaHeads
from penstock.generation.core.index_heads import IndexHeads
from penstock.generation.core.latent_heads import LatentHeads
from penstock.generation.core.layer_shapes import LayerInputs, LayerShape
from penstock.generation.core.media_ids import MediaIds

CONFIG_FILE = "config.json"
# No model has more. A config.json may contain any number, and lists of that length are made before weights are read.
MAX_LAYERS = 10_000
# Sizes and lengths are 32 bits on the wire.
_MAX_INTEGER = 2**31 - 1
# Numbers outside these bounds are useless for arithmetic in float32.
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30


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
    # longrope: divisors of the frequencies.
    divisors: tuple[float, ...] = ()
    # Dims of a head that turn, its first ones; 0: all.
    rotary_dim: int = 0
    # Neighbouring dims turn together, not those half of `rotary_dim` apart.
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms over the hidden size. None: there is no norm in this place.

    Those before read the residual stream; those after change what attention or MLP add to it.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    # None in Cohere, too, where attention and MLP read the same norm (ModelConfig.is_parallel).
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the norms that there are, in order."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name is not None)


class NormKind(Enum):
    """Arithmetic of a model's norms. All compute in float32."""

    # Rounded to the model's dtype, then times the weight.
    RMS = auto()
    # Times the weight in float32, then rounded.
    RMS_ROUNDED_ONCE = auto()
    # Less the mean, as RMS_ROUNDED_ONCE.
    LAYER = auto()


class Activation(IntEnum):
    """Functions that gate an MLP, numbered as in csrc/linear/linear.h."""

    SILU = 1
    GELU_TANH = 2
    # gpt-oss: silu(1.702 gate) / 1.702 * (up + 1), both clamped at 7.
    CLAMPED = 3


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router's scores choose a row's experts. The usual one takes the highest of a softmax."""

    # Scores are sigmoids, not a softmax.
    is_sigmoid: bool = False
    # A bias of each expert counts in the choice, and not in the row's share in it.
    has_bias: bool = False
    # Experts are in groups of one size; a row's are all from its best groups.
    num_groups: int = 1
    groups_of_row: int = 1
    # Number of a group's highest scores that its rank is the sum of.
    ranked_by: int = 1
    # Factor on the shares.
    scale: float = 1.0
    # The router's weights stay in float32, and it reads its rows so.
    in_float32: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a model: each row goes to a few MLPs, which a router chooses."""

    count: int
    # Experts of a row.
    per_row: int
    # Width of an expert's MLP.
    inner: int
    # The shares of a row's experts add up to 1.
    sums_to_one: bool
    # One entry per layer: True if it has experts, False for a plain MLP.
    layers: tuple[bool, ...]
    # Width of the MLP that every row uses in addition to its experts; 0: there is none.
    shared_inner: int = 0
    # Name of the module, of its router, and of an expert's gate, up and down.
    module: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # One tensor has all experts, transposed, with gate and up interleaved; there are biases (gpt-oss).
    is_stacked: bool = False
    routing: Routing = Routing()
    # Name of the MLP that every row uses, and if the sigmoid of one more output multiplies it.
    shared: str = "shared_expert"
    shared_is_gated: bool = True


# Values of --model-route.
ROUTES = ("auto", "native", "fallback")


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Choice of the code that runs a model: native families, or transformers' own modules."""

    # One of ROUTES; auto: native where the model type is.
    route: str = "auto"
    # Python code of the model's folder may run.
    trust_remote_code: bool = False
    # The start compares a model of the fallback with transformers' own attention.
    self_check: bool = True


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
    # Rotary embedding of each layer, None for one without; empty: `rope` for all of them.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    norms: LayerNorms = LayerNorms()
    norm_kind: NormKind = NormKind.RMS
    # Added to the weights of norms.
    norm_offset: float = 0.0
    # Attention and MLP read the same norm, and both are added to the stream at once.
    is_parallel: bool = False
    # `qk_norm` is over all heads together.
    qk_norm_is_whole: bool = False
    activation: Activation = Activation.SILU
    # The checkpoint has one tensor for q, k and v, or for gate and up.
    qkv_is_one: bool = False
    gate_up_is_one: bool = False
    # Factor on attention's scores; None: head_dim ** -0.5.
    attention_scale: float | None = None
    # Scores s become cap * tanh(s / cap); 0: they stay. The same of the logits.
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    # Every head has a sink: a score that takes weight and has no value.
    has_sinks: bool = False
    # Factors on the embedding, on all that a layer adds to the stream, and on the logits.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    # The factor applies to a caller's embeddings, too.
    scales_given_embeds: bool = False
    # None: every layer has a plain MLP.
    experts: Experts | None = None
    # Multi-head latent attention. The pool's geometry (`num_kv_heads`, `head_dim`) is that of a token's one row then.
    # None: heads have keys and values of their own.
    latent: LatentHeads | None = None
    # Rows of latent attention read the positions that an indexer chose. None: they read all.
    index: IndexHeads | None = None
    # Some layers keep a state instead of keys and values. None: all attend.
    delta: DeltaHeads | None = None
    # Each head of attention has a gate beside its query: the sigmoid of it multiplies the head's output.
    has_gates: bool = False
    # One entry per layer, where layers differ in heads, or read the keys of others; empty: the sizes above are those of
    # all. The pool's geometry (`num_kv_heads`, `head_dim`) is that of the layer with the widest keys.
    layer_shapes: tuple[LayerShape, ...] = ()
    # Values are normed, without a weight.
    norms_values: bool = False
    # The stream after each layer is multiplied by a number of the layer.
    has_layer_scalars: bool = False
    # None: layers have no vectors of tokens.
    layer_inputs: LayerInputs | None = None
    # None: every id has an embedding of its own.
    media_ids: MediaIds | None = None
    # Layers after the last one that the checkpoint has for drafts. The model does without them: models.mtp reads them.
    num_draft_layers: int = 0
    # They are named as layers that follow (weights.draft_layers).
    drafts_are_layers: bool = True

    # "native" or "fallback": the code that runs it. In the fallback, layers and heads are the KV pool's, set by the
    # loader, and fields of native layers mean nothing.
    route: str = "native"
    # Field of config.json, and its fault, that keeps the native family of this model type from running it; empty: none.
    route_reason: str = ""
    # A quantised checkpoint's format in words; empty: it is not quantised.
    checkpoint_format: str = ""
    # Format of most of its matrices, int8 or int4; empty: none.
    kept_form: str = ""
    # Number of its quantised matrices by the format that they run in; set by the loader.
    weight_forms: tuple[tuple[str, int], ...] = ()

    @property
    def has_values(self) -> bool:
        """True when a token keeps values beside its keys: those of a latent are read out of the key."""
        return self.latent is None

    def rope_width(self, layer: int) -> int:
        """Return the dims of a head that a layer's rotary embedding is made for."""
        return self.shape(layer).head_dim if self.latent is None else self.latent.turned_dim

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that have keys in the pool."""
        if self.layer_shapes:
            return len(self.kv_shapes)
        return self.num_layers if self.delta is None else self.num_layers - self.delta.num_layers

    @property
    def widest_head(self) -> int:
        """Most dims of a head of any layer."""
        return max((shape.head_dim for shape in self.layer_shapes), default=self.head_dim)

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers that have keys in the pool, in order; empty: they are alike."""
        return tuple(shape for shape in self.layer_shapes if shape.source is None)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Numbers of a token's keys in each of these layers; empty: they are alike."""
        return tuple(shape.kv_width for shape in self.kv_shapes)

    @property
    def has_graphs(self) -> bool:
        """True when callers may run the model's layers one by one: each keeps keys and values of one size, and has no
        gates, and no vectors of tokens."""
        return self.has_values and self.delta is None and not self.has_gates and not self.layer_shapes

    def shape(self, layer: int) -> LayerShape:
        """Return the sizes of a layer."""
        if self.layer_shapes:
            return self.layer_shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size)

    def keeps_state(self, layer: int) -> bool:
        """True when the layer keeps a state of each sequence instead of keys and values."""
        return self.delta is not None and self.delta.layers[layer]

    def kv_place(self, layer: int) -> int:
        """Return the number, among the layers that have keys in the pool, of the one with the keys that a layer reads:
        its own, as a rule."""
        if self.layer_shapes:
            source = self.layer_shapes[layer].source
            own = layer if source is None else source
            return sum(shape.source is None for shape in self.layer_shapes[:own])
        return layer if self.delta is None else self.delta.place(layer)

    def has_experts(self, layer: int) -> bool:
        """True when the layer has a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]


class UnsupportedField(StartupError):
    """Error for a valid field of config.json that the native family cannot honour; another route may.

    `reason` is the field and the fault, without the file.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, flag="MODEL")
        self.reason = reason


class ConfigReader:
    """Typed access to one JSON object; every error is a StartupError that names file and field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def error(self, field: str, problem: str) -> StartupError:
        """Return a StartupError that reads `config.json in <folder>: <field> <problem>`."""
        return StartupError(f"{self.source}: {self.prefix}{field} {problem}", flag="MODEL")

    def unsupported(self, field: str, problem: str) -> UnsupportedField:
        """Return the same for a field that only the native families do not honour."""
        return UnsupportedField(self.error(field, problem).message, f"{self.prefix}{field} {problem}")

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
        if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self.error(field, f"must be between {_LEAST_NUMBER:g} and {_MOST_NUMBER:g}")
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
        if not value.isascii() and not value.isprintable():
            # Half of a surrogate pair, for example, cannot be sent.
            raise self.error(field, f"must be printable, found {value!r}")
        return value

    def whole_numbers(self, field: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """Read a list of whole numbers of at least `minimum`; None when absent or null."""
        if not self.has(field):
            return None
        value = self.values[field]
        if not isinstance(value, list) or any(
            type(one) is not int or not minimum <= one <= _MAX_INTEGER for one in value
        ):
            raise self.error(field, f"must be a list of whole numbers of at least {minimum}, found {value!r}")
        return tuple(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        """Read a required list of numbers above 0."""
        value = self._get(field, None)
        if not isinstance(value, list) or any(
            type(one) not in (int, float) or not _LEAST_NUMBER <= one <= _MOST_NUMBER for one in value
        ):
            raise self.error(field, f"must be a list of numbers above 0, found {value!r}")
        return tuple(map(float, value))

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
        if any(isinstance(one, list) for one in values):
            # Runs of several ids are read with generation_config.json.
            runs = [one if isinstance(one, list) else [one] for one in values]
            if any(not run or any(type(one) is not int or not 0 <= one <= _MAX_INTEGER for one in run) for run in runs):
                raise self.error(field, f"must be a token id, a list of them, or of lists of them, found {value!r}")
            values = [run[0] for run in runs if len(run) == 1]
        if any(type(one) is not int or not 0 <= one <= _MAX_INTEGER for one in values):
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
