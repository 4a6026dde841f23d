"""The tensors of a model with a certain configuration, in a checkpoint and fused for the computation. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.generation.core.model_config import ModelConfig

# Hugging Face's names.
EMBEDDING, LM_HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class LayerLinear:
    """A linear layer of every decoder layer: the outputs of all its parts, in order, in one product."""

    # Such as self_attn.qkv_proj; a checkpoint has the `parts` instead, with this many rows each.
    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    inputs: int
    has_bias: bool
    # The first half of the outputs gates the second.
    gated: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs of all parts, and of inputs."""
        return sum(self.rows), self.inputs


def layer_prefix(index: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return f"model.layers.{index}."


def layer_linears(config: ModelConfig) -> tuple[LayerLinear, LayerLinear, LayerLinear, LayerLinear]:
    """Return the four linear layers of a decoder layer: qkv, output, gated, down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return (
        LayerLinear("self_attn.qkv_proj", qkv, (query, kv, kv), hidden, config.qkv_bias),
        LayerLinear("self_attn.o_proj", ("self_attn.o_proj",), (hidden,), query, config.output_bias),
        LayerLinear("mlp.gate_up_proj", gate_up, (inner, inner), hidden, config.mlp_bias, gated=True),
        LayerLinear("mlp.down_proj", ("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
    )


def layer_norms(config: ModelConfig) -> dict[str, int]:
    """Return name -> width of the norms of every layer."""
    norms = {"input_layernorm.weight": config.hidden_size, "post_attention_layernorm.weight": config.hidden_size}
    if config.qk_norm:
        norms |= {"self_attn.q_norm.weight": config.head_dim, "self_attn.k_norm.weight": config.head_dim}
    return norms


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that such a checkpoint must have (Hugging Face's names)."""
    layer: dict[str, tuple[int, ...]] = {}
    for linear in layer_linears(config):
        for name, rows in zip(linear.parts, linear.rows, strict=True):
            layer[f"{name}.weight"] = (rows, linear.inputs)
            if linear.has_bias:
                layer[f"{name}.bias"] = (rows,)
    layer |= {name: (width,) for name, width in layer_norms(config).items()}
    shapes = {f"{layer_prefix(i)}{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
