"""A model family's differences from others: flags for the one decoder. A family is a file that fills them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.common.dtypes import dtype_name
from penstock.generation.core.model_config import MAX_LAYERS, Activation, ConfigReader, ModelConfig, RopeConfig
from penstock.generation.layers.rope import read_rope, read_rope_parameters

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


def never(config: ConfigReader) -> bool:
    """A flag that is off in this family."""
    return False


def always(config: ConfigReader) -> bool:
    """A flag that is on in this family."""
    return True


def from_field(name: str) -> Callable[[ConfigReader], bool]:
    """A flag that config.json decides; off by default."""
    return lambda config: config.boolean(name, False)


def no_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of a model in which every layer sees everything."""
    return (None,) * num_layers


def unchanged(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """A family that the flags describe completely."""
    return model


@dataclass(frozen=True, slots=True)
class Family:
    """Flags of a family, and its configuration class's defaults for fields that config.json may leave out."""

    model_type: str
    architecture: str
    qkv_bias: Callable[[ConfigReader], bool] = never
    output_bias: Callable[[ConfigReader], bool] = never
    mlp_bias: Callable[[ConfigReader], bool] = never
    qk_norm: bool = False
    sliding_windows: Callable[[ConfigReader, int], tuple[int | None, ...]] = no_windows
    defaults: Mapping[str, int] = field(default_factory=dict)
    # None: hidden_size / num_attention_heads.
    default_head_dim: int | None = None
    default_bos: int | None = None
    default_eos: tuple[int, ...] = ()
    default_theta: float = 10_000.0
    default_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    activation_field: str = "hidden_act"
    default_activation: str = "silu"
    default_tied: bool = False
    # None: the rotary embedding that most families have (layers.rope.read_rope).
    rope: Callable[[ConfigReader, int, int], RopeConfig] | None = None
    # Sets the fields of ModelConfig beyond the flags above, and refuses unsupported values.
    finish: Callable[[ConfigReader, ModelConfig], ModelConfig] = unchanged

    def model_config(self, config: ConfigReader, generation: ConfigReader) -> ModelConfig:
        """The checked configuration. Raises StartupError naming the field of config.json that is wrong."""
        return self.finish(config, self._by_flags(config, generation))

    def _by_flags(self, config: ConfigReader, generation: ConfigReader) -> ModelConfig:
        activation = self._activation(config)
        num_layers = config.integer("num_hidden_layers", self.defaults.get("num_hidden_layers"), maximum=MAX_LAYERS)
        num_heads = config.integer("num_attention_heads", self.defaults.get("num_attention_heads"))
        num_kv_heads = config.integer("num_key_value_heads", self._default_kv_heads(config, num_heads))
        if num_heads % num_kv_heads:
            raise config.error(
                "num_attention_heads", f"({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        max_positions = config.integer("max_position_embeddings", self.defaults.get("max_position_embeddings"))
        head_dim = self._head_dim(config, num_heads)
        if self.rope is None:
            rope = read_rope(config, max_positions, self.default_theta)
        else:
            rope = self.rope(config, max_positions, head_dim)
        return ModelConfig(
            model_type=self.model_type,
            architecture=self.architecture,
            vocab_size=config.integer("vocab_size", self.defaults.get("vocab_size")),
            hidden_size=config.integer("hidden_size", self.defaults.get("hidden_size")),
            intermediate_size=config.integer("intermediate_size", self.defaults.get("intermediate_size")),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=config.number(self.eps_field, self.default_eps),
            rope=rope,
            tie_word_embeddings=config.boolean("tie_word_embeddings", self.default_tied),
            qkv_bias=self.qkv_bias(config),
            output_bias=self.output_bias(config),
            mlp_bias=self.mlp_bias(config),
            qk_norm=self.qk_norm,
            sliding_windows=self.sliding_windows(config, num_layers),
            eos_token_ids=self._eos(config, generation),
            bos_token_id=self._bos(config),
            pad_token_id=self._pad(config),
            checkpoint_dtype=dtype_name(config.text("dtype", config.text("torch_dtype", ""))) or None,
            activation=activation,
        )

    def _bos(self, config: ConfigReader) -> int | None:
        return config.optional_integer("bos_token_id") if "bos_token_id" in config.values else self.default_bos

    def _pad(self, config: ConfigReader) -> int | None:
        """Id of the padding token; None also for the -1 that older Llama checkpoints say."""
        return None if config.values.get("pad_token_id") == -1 else config.optional_integer("pad_token_id")

    def _eos(self, config: ConfigReader, generation: ConfigReader) -> tuple[int, ...]:
        own = config.token_ids("eos_token_id") if "eos_token_id" in config.values else self.default_eos
        return generation.token_ids("eos_token_id") or own

    def _default_kv_heads(self, config: ConfigReader, num_heads: int) -> int:
        """Number of key/value heads: the class default when the field is absent; that of query heads when it is null or
        has no default."""
        if "num_key_value_heads" in config.values:
            return num_heads
        return self.defaults.get("num_key_value_heads", num_heads)

    def _head_dim(self, config: ConfigReader, num_heads: int) -> int:
        default = self.default_head_dim
        if not config.has("head_dim") and default is None:
            hidden_size = config.integer("hidden_size", self.defaults.get("hidden_size"))
            if hidden_size % num_heads:
                raise config.error(
                    "hidden_size", f"({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
                )
            default = hidden_size // num_heads
        head_dim = config.integer("head_dim", default)
        if head_dim % 2:
            raise config.unsupported("head_dim", f"({head_dim}) must be even: rotary embedding turns pairs")
        return head_dim

    def _activation(self, config: ConfigReader) -> Activation:
        """Return the family's activation, after refusing settings that no native family honours."""
        name = config.text(self.activation_field, self.default_activation)
        expected = ACTIVATIONS[self.default_activation]
        if ACTIVATIONS.get(name) is not expected:
            raise config.unsupported(
                self.activation_field, f"{name!r} is not supported; supported is {self.default_activation}"
            )
        return expected


def read_layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    """Read `layer_types`, FULL or SLIDING for each layer; None when absent. Raises StartupError naming the field."""
    types = config.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not all(isinstance(one, str) for one in types):
        raise config.error("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}")
    if other := sorted({one for one in types if one not in (FULL, SLIDING)}):
        raise config.unsupported("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}, found {other[0]!r}")
    if len(types) != num_layers:
        raise config.error("layer_types", f"has {len(types)} entries, num_hidden_layers is {num_layers}")
    return tuple(types)


def read_rope_of_kind(config: ConfigReader, max_positions: int, kind: str, theta: float) -> RopeConfig:
    """Read the rotary embedding of FULL or SLIDING layers, in 5.x's form (`rope_parameters` by kind) or the one before,
    where `rope_scaling` is that of full layers. `theta` where neither names one."""
    by_kind = config.mapping("rope_parameters")
    own = None if by_kind is None else by_kind.mapping(kind)
    if kind == FULL and config.values.get("rope_scaling"):
        own = config.mapping("rope_scaling")
    if own is None:
        return RopeConfig("default", theta)
    return read_rope_parameters(config, own, max_positions, theta)


def windows_in_turns(
    config: ConfigReader, num_layers: int, *, default_window: int, period: int
) -> tuple[int | None, ...]:
    """Windows of layers that slide, except every `period`th one, unless `layer_types` lists the sliding ones."""
    window = config.integer("sliding_window", default_window)
    types = read_layer_types(config, num_layers)
    if types is None:
        types = tuple(SLIDING if (layer + 1) % period else FULL for layer in range(num_layers))
    return tuple(window if one == SLIDING else None for one in types)


def windows_by_layer_type(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows by Qwen's rule (transformers 5.x): explicit `layer_types`, else layers from `max_window_layers` on slide,
    and only if `use_sliding_window` and `sliding_window` are set. (4.41 slid the layers before it.)"""
    window = config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) is not None else None
    if not config.boolean("use_sliding_window", False):
        window = None
    types = read_layer_types(config, num_layers)
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if SLIDING in types and window is None:
        raise config.error("layer_types", "has sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(window if one == SLIDING else None for one in types)
