"""A model family's differences from others: flags over the one decoder. A family is a file that fills them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.generation.core.model_config import MAX_LAYERS, ConfigReader, ModelConfig
from penstock.generation.layers.rope import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


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

    def model_config(self, config: ConfigReader, generation: ConfigReader) -> ModelConfig:
        """The checked configuration. Raises StartupError naming the field of config.json that is wrong."""
        self._refuse_unsupported(config)
        num_layers = config.integer("num_hidden_layers", self.defaults.get("num_hidden_layers"), maximum=MAX_LAYERS)
        num_heads = config.integer("num_attention_heads", self.defaults.get("num_attention_heads"))
        num_kv_heads = config.integer("num_key_value_heads", self._default_kv_heads(config, num_heads))
        if num_heads % num_kv_heads:
            raise config.error(
                "num_attention_heads", f"({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        max_positions = config.integer("max_position_embeddings", self.defaults.get("max_position_embeddings"))
        return ModelConfig(
            model_type=self.model_type,
            architecture=self.architecture,
            vocab_size=config.integer("vocab_size", self.defaults.get("vocab_size")),
            hidden_size=config.integer("hidden_size", self.defaults.get("hidden_size")),
            intermediate_size=config.integer("intermediate_size", self.defaults.get("intermediate_size")),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self._head_dim(config, num_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=read_rope(config, max_positions),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            qkv_bias=self.qkv_bias(config),
            output_bias=self.output_bias(config),
            mlp_bias=self.mlp_bias(config),
            qk_norm=self.qk_norm,
            sliding_windows=self.sliding_windows(config, num_layers),
            eos_token_ids=self._eos(config, generation),
            bos_token_id=self._bos(config),
            pad_token_id=self._pad(config),
            checkpoint_dtype=config.text("dtype", config.text("torch_dtype", "")).removeprefix("torch.") or None,
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
            raise config.error("head_dim", f"({head_dim}) must be even: rotary embedding turns pairs")
        return head_dim

    def _refuse_unsupported(self, config: ConfigReader) -> None:
        if config.text("hidden_act", "silu") not in ("silu", "swish"):
            raise config.error("hidden_act", f"{config.values['hidden_act']!r} is not supported; supported is silu")


def windows_by_layer_type(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows by Qwen's rule (transformers 5.x): explicit `layer_types`, else layers from `max_window_layers` on slide,
    and only if `use_sliding_window` and `sliding_window` are set. (4.41 slid the layers before it.)"""
    window = config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) is not None else None
    if not config.boolean("use_sliding_window", False):
        window = None
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or any(one not in (FULL, SLIDING) for one in types):
        raise config.error("layer_types", f"must be a list of {FULL!r} and {SLIDING!r}")
    if len(types) != num_layers:
        raise config.error("layer_types", f"has {len(types)} entries, num_hidden_layers is {num_layers}")
    if SLIDING in types and window is None:
        raise config.error("layer_types", "has sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(window if one == SLIDING else None for one in types)
