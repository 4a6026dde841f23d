"""The tensors of a model with a certain configuration, in a checkpoint and fused for the computation. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from penstock.generation.core.delta_heads import DeltaHeads
from penstock.generation.core.latent_heads import LatentHeads
from penstock.generation.core.layer_shapes import LayerShape
from penstock.generation.core.model_config import ModelConfig, NormKind
from penstock.generation.weights.part_orders import ByKind, GatedQueries, HeadRows, PartOrders

if TYPE_CHECKING:
    from torch import Tensor

DELTA_CONV, DELTA_DECAY, DELTA_BIAS, DELTA_NORM = (
    f"linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
)
INDEX_NORM = "self_attn.indexer.k_norm"
LATENT_NORM, QUERY_NORM = "self_attn.kv_a_layernorm", "self_attn.q_a_layernorm"
# Hugging Face's names.
EMBEDDING, LM_HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# Of vectors of tokens for each layer: their table, the norm of the product that is joined with it, and in a layer the
# norm of what it adds to the stream.
INPUT_TABLE, INPUT_NORM = "model.embed_tokens_per_layer.weight", "model.per_layer_projection_norm.weight"
INPUT_OUT_NORM = "post_per_layer_input_norm.weight"
LAYER_SCALAR = "layer_scalar"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Another order of the dims of each head of q and k, so that dim i turns with dim i + head_dim / 2.

    Scores do not change when the dims of queries and keys change places together. So a model with another rotary
    embedding gets its rows of q and k in this order, and needs no other kernel.
    """

    # Rows of q and k, the first ones of the joined weight.
    rows: int
    # For each dim of a head, the checkpoint's dim in its place.
    dims: tuple[int, ...]

    def applied(self, rows_OX: Tensor, first: int = 0) -> Tensor:
        """Return rows of the joined weight or bias, from `first` on, in this order: whole heads of q and k, and any
        rows after them."""
        count = min(max(self.rows - first, 0), rows_OX.shape[0])
        if not count:
            return rows_OX
        heads = rows_OX[:count].view(count // len(self.dims), len(self.dims), -1)
        ordered = rows_OX.clone()
        ordered[:count] = heads[:, list(self.dims)].view(count, *rows_OX.shape[1:])
        return ordered

    def multiple(self, first: int) -> int:
        """Return the number of rows that must be read together from row `first` on."""
        return len(self.dims)


RowOrder: TypeAlias = HeadOrder | PartOrders


@dataclass(frozen=True, slots=True)
class LayerLinear:
    """A linear layer of a decoder layer: the outputs of all its parts, in order, in one product."""

    # Such as self_attn.qkv_proj; a checkpoint has the `parts` instead, with this many rows each.
    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    inputs: int
    has_bias: bool
    # The first half of the outputs gates the second.
    gated: bool = False
    # Not quantised by --quantization.
    is_exact: bool = False
    order: RowOrder | None = None
    # Not None: the weight is this expert's, of a tensor with all experts (experts, inputs, outputs), and its gates and
    # values are interleaved.
    expert: int | None = None
    # Kept in float32 for any dtype of the model, with rows in float32.
    is_float32: bool = False
    # Read as a plain matrix of the model's dtype, for products of the layer's own.
    is_matrix: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs of all parts, and of inputs."""
        return sum(self.rows), self.inputs


def layer_prefix(index: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return f"model.layers.{index}."


def layer_linears(config: ModelConfig, layer: int = 0) -> tuple[LayerLinear, ...]:
    """Return the linear layers of a decoder layer: those of attention, of its indexer, of its MLP, then those of a
    token's vector."""
    return (
        *attention_linears(config, layer),
        *index_linears(config, layer),
        *mlp_linears(config, layer),
        *input_linears(config),
    )


def attention_linears(config: ModelConfig, layer: int = 0) -> tuple[LayerLinear, ...]:
    """Return the linear layers of a layer's attention: qkv, output.

    Latent attention has more, its output last: one or two that make the queries, that of a token's row, and what
    expands it. A layer with a state has those of its rows and gates, of the numbers that fade and correct the state,
    and its output.
    """
    if config.keeps_state(layer):
        assert config.delta is not None
        return _delta_linears(config, config.delta)
    if config.latent is not None:
        return *_latent_linears(config, config.latent), _output(config)
    if config.layer_shapes:
        return _qkv_of(config, config.layer_shapes[layer]), _output_of(config, config.layer_shapes[layer])
    return _qkv(config), _output(config)


def index_linears(config: ModelConfig, layer: int) -> tuple[LayerLinear, ...]:
    """Return the linear layers of a layer's indexer: queries, key, weights; nothing where it has none.

    All stay as they are: with rounded ones it would choose other positions.
    """
    heads, latent = config.index, config.latent
    if heads is None or latent is None or not heads.layers[layer]:
        return ()

    def one(name: str, rows: int, inputs: int) -> LayerLinear:
        name = f"self_attn.indexer.{name}"
        return LayerLinear(name, (name,), (rows,), inputs, has_bias=False, is_exact=True)

    weights = replace(one("weights_proj", heads.count, config.hidden_size), is_float32=True)
    return one("wq_b", heads.count * heads.dim, latent.query_rank), one("wk", heads.dim, config.hidden_size), weights


def mlp_linears(config: ModelConfig, layer: int) -> tuple[LayerLinear, ...]:
    """Return the linear layers of a layer's MLP: gated, down.

    With experts: the router, then gated and down of every expert, and last gated, down and gate of the MLP that all
    rows share, as far as there are such.
    """
    if not config.has_experts(layer):
        return _mlp(config, "mlp", config.shape(layer).inner)
    return _expert_linears(config)


def input_linears(config: ModelConfig) -> tuple[LayerLinear, ...]:
    """Return the linear layers of a layer that read a token's vector for it: the gate, and what the stream gets;
    nothing where tokens have none."""
    if config.layer_inputs is None:
        return ()
    dim = config.layer_inputs.dim
    return (
        LayerLinear("per_layer_input_gate", ("per_layer_input_gate",), (dim,), config.hidden_size, has_bias=False),
        LayerLinear("per_layer_projection", ("per_layer_projection",), (config.hidden_size,), dim, has_bias=False),
    )


# Before the name of a linear layer that belongs to no layer.
MODEL_PREFIX = "model."


def model_linears(config: ModelConfig) -> tuple[LayerLinear, ...]:
    """Return the linear layers of the model, apart from its head, that belong to no layer: the product of the embedding
    that is a part of tokens' vectors. Their prefix is MODEL_PREFIX."""
    if config.layer_inputs is None:
        return ()
    name, rows = "per_layer_model_projection", config.num_layers * config.layer_inputs.dim
    return (LayerLinear(name, (name,), (rows,), config.hidden_size, has_bias=False),)


def model_norms(config: ModelConfig) -> dict[str, int]:
    """Return name -> width of the norms that belong to no layer, without the last one."""
    return {} if config.layer_inputs is None else {INPUT_NORM: config.layer_inputs.dim}


def unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return how names of tensors begin that a checkpoint may have and nothing reads: products of keys and values of
    layers that read others'."""
    return tuple(
        f"{layer_prefix(layer)}self_attn.{name}"
        for layer, shape in enumerate(config.layer_shapes)
        if shape.source is not None
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )


def site_linears(config: ModelConfig, layer: int) -> tuple[LayerLinear | None, ...]:
    """Return the linear layers of a decoder layer that adapters may change, in the order of the sites of layers.lora;
    None: not possible there."""
    attention = attention_linears(config, layer)
    qkv = attention[0] if config.latent is None and not config.keeps_state(layer) else None
    mlp = (None, None) if config.has_experts(layer) else mlp_linears(config, layer)
    return qkv, attention[-1], *mlp


def _delta_linears(config: ModelConfig, delta: DeltaHeads) -> tuple[LayerLinear, ...]:
    hidden, share = config.hidden_size, delta.value_heads // delta.key_heads

    def one(name: str, parts: tuple[str, ...], rows: tuple[int, ...], kinds: tuple[int, ...]) -> LayerLinear:
        order = PartOrders((ByKind(delta.key_heads, kinds),)) if delta.by_key_head else None
        parts = (name,) if delta.by_key_head else parts
        rows = (sum(rows),) if delta.by_key_head else rows
        parts = tuple(f"linear_attn.{part}" for part in parts)
        return LayerLinear(f"linear_attn.{name}", parts, rows, hidden, has_bias=False, order=order)

    wide = share * delta.value_dim
    rows = one(
        "in_proj_qkvz",
        ("in_proj_qkv", "in_proj_z"),
        (delta.channels, delta.values),
        (delta.key_dim, delta.key_dim, wide, wide),
    )
    numbers = one("in_proj_ba", ("in_proj_b", "in_proj_a"), (delta.value_heads,) * 2, (share, share))
    output = LayerLinear("linear_attn.out_proj", ("linear_attn.out_proj",), (hidden,), delta.values, has_bias=False)
    return rows, replace(numbers, is_exact=True), output


def _latent_linears(config: ModelConfig, latent: LatentHeads) -> tuple[LayerLinear, ...]:
    """Return all but the output."""
    hidden, rank = config.hidden_size, latent.query_rank
    queries = config.num_heads * latent.query_dim

    def one(
        name: str, rows: int, inputs: int, *, has_bias: bool = False, order: HeadOrder | None = None
    ) -> LayerLinear:
        return LayerLinear(f"self_attn.{name}", (f"self_attn.{name}",), (rows,), inputs, has_bias, order=order)

    order = _latent_order(config, queries, latent.plain_dim)
    query: tuple[LayerLinear, ...]
    if rank:
        query = (
            one("q_a_proj", rank, hidden, has_bias=config.qkv_bias),
            one("q_b_proj", queries, rank, order=order),
        )
    else:
        query = (one("q_proj", queries, hidden, order=order),)
    row = one(
        "kv_a_proj_with_mqa",
        latent.row_dim,
        hidden,
        has_bias=config.qkv_bias,
        order=_latent_order(config, latent.row_dim, latent.rank),
    )
    expanded = config.num_heads * (latent.plain_dim + latent.value_dim)
    return *query, row, replace(one("kv_b_proj", expanded, latent.rank), is_exact=True, is_matrix=True)


def _latent_order(config: ModelConfig, rows: int, plain: int) -> HeadOrder | None:
    """Return the order of heads with `plain` dims that do not turn, and after them those that do; None: unchanged."""
    if config.latent is None or not config.rope.is_interleaved:
        return None
    turned = range(plain, plain + config.latent.turned_dim)
    return HeadOrder(rows, (*range(plain), *turned[::2], *turned[1::2]))


def _qkv(config: ModelConfig) -> LayerLinear:
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows: tuple[int, ...] = (query, kv, kv)
    if config.qkv_is_one:
        parts, rows = ("self_attn.qkv_proj",), (query + 2 * kv,)
    order: RowOrder | None = _head_order(config)
    if config.has_gates:
        # Gates come first in the joined rows, so that the others are neighbours.
        own = range(config.head_dim)
        dims = order.dims if isinstance(order, HeadOrder) else own
        queries, keys, values = (
            GatedQueries(config.num_heads, dims),
            HeadRows(config.num_kv_heads, dims),
            HeadRows(config.num_kv_heads, own),
        )
        order = PartOrders((queries, keys, values))
        rows = (2 * query, kv, kv)
    return LayerLinear("self_attn.qkv_proj", parts, rows, config.hidden_size, config.qkv_bias, order=order)


def _qkv_of(config: ModelConfig, shape: LayerShape) -> LayerLinear:
    """Return the product of a layer with a shape of its own, as far as it has the parts."""
    parts = [("self_attn.q_proj", config.num_heads * shape.head_dim)]
    if shape.source is None:
        parts += [("self_attn.k_proj", shape.kv_width), ("self_attn.v_proj", shape.kv_width)]
        if shape.values_are_keys:
            parts.pop()
    names, rows = zip(*parts, strict=True)
    return LayerLinear("self_attn.qkv_proj", names, rows, config.hidden_size, config.qkv_bias)


def _output_of(config: ModelConfig, shape: LayerShape) -> LayerLinear:
    inputs = config.num_heads * shape.head_dim
    return LayerLinear("self_attn.o_proj", ("self_attn.o_proj",), (config.hidden_size,), inputs, config.output_bias)


def _output(config: ModelConfig) -> LayerLinear:
    query = config.num_heads * (config.head_dim if config.latent is None else config.latent.value_dim)
    return LayerLinear("self_attn.o_proj", ("self_attn.o_proj",), (config.hidden_size,), query, config.output_bias)


def _mlp(
    config: ModelConfig, module: str, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[LayerLinear, LayerLinear]:
    gate, up, down = (f"{module}.{name}" for name in names)
    parts: tuple[str, ...] = (gate, up)
    rows: tuple[int, ...] = (inner, inner)
    if config.gate_up_is_one:
        parts, rows = (f"{module}.gate_up_proj",), (2 * inner,)
    return (
        LayerLinear(f"{module}.gate_up_proj", parts, rows, config.hidden_size, config.mlp_bias, gated=True),
        LayerLinear(f"{module}.down_proj", (down,), (config.hidden_size,), inner, config.mlp_bias),
    )


def _expert_linears(config: ModelConfig) -> tuple[LayerLinear, ...]:
    experts = config.experts
    assert experts is not None
    module, hidden = experts.module, config.hidden_size

    def exact(name: str, outputs: int, *, has_bias: bool = False) -> LayerLinear:
        return LayerLinear(name, (name,), (outputs,), hidden, has_bias, is_exact=True)

    router = exact(f"{module}.{experts.router}", experts.count, has_bias=experts.is_stacked)
    found = [replace(router, is_float32=experts.routing.in_float32)]
    for number in range(experts.count):
        if experts.is_stacked:
            found += _stacked_expert(config, module, number, experts.inner)
        else:
            found += _mlp(config, f"{module}.experts.{number}", experts.inner, experts.parts)
    if experts.shared_inner:
        found += _mlp(config, f"{module}.{experts.shared}", experts.shared_inner)
        if experts.shared_is_gated:
            found.append(exact(f"{module}.{experts.shared}_gate", 1))
    return tuple(found)


def _stacked_expert(config: ModelConfig, module: str, number: int, inner: int) -> tuple[LayerLinear, LayerLinear]:
    hidden = config.hidden_size
    gate_up, down = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    own = f"{module}.experts.{number}"
    return (
        LayerLinear(f"{own}.gate_up_proj", (gate_up,), (2 * inner,), hidden, has_bias=True, gated=True, expert=number),
        LayerLinear(f"{own}.down_proj", (down,), (hidden,), inner, has_bias=True, expert=number),
    )


def _head_order(config: ModelConfig) -> HeadOrder | None:
    """Return the order in which q and k must be read; None: unchanged."""
    rope, half = config.rope, config.head_dim // 2
    turning = rope.rotary_dim or config.head_dim
    if turning == config.head_dim and not rope.is_interleaved:
        return None
    pairs = [(2 * i, 2 * i + 1) if rope.is_interleaved else (i, turning // 2 + i) for i in range(turning // 2)]
    rest = list(range(turning, config.head_dim))
    middle = half - len(pairs)
    first = [pair[0] for pair in pairs] + rest[:middle]
    second = [pair[1] for pair in pairs] + rest[middle:]
    rows = (config.num_heads + config.num_kv_heads) * config.head_dim
    return HeadOrder(rows, (*first, *second))


def rounds_once(config: ModelConfig) -> bool:
    """True when norms, and everything in `layer_norms`, are kept in float32 for any dtype of the model."""
    return config.norm_kind is not NormKind.RMS


def head_dims(config: ModelConfig) -> tuple[int, ...] | None:
    """Return for each dim of a head of q and k the checkpoint's dim in its place; None: unchanged."""
    order = _head_order(config)
    return None if order is None else order.dims


def layer_norms(config: ModelConfig, layer: int = 0) -> dict[str, int]:
    """Return name -> width of the norms of a layer, of the sinks of its heads, and of its scalar."""
    norms = {f"{name}.weight": config.hidden_size for name in config.norms.names}
    if config.keeps_state(layer):
        return norms
    if config.layer_inputs is not None:
        norms[INPUT_OUT_NORM] = config.hidden_size
    if config.has_layer_scalars:
        norms[LAYER_SCALAR] = 1
    if config.layer_shapes:
        shape = config.layer_shapes[layer]
        names = "q" if shape.source is not None else "qk"
        return norms | {f"self_attn.{name}_norm.weight": shape.head_dim for name in names if config.qk_norm}
    if config.qk_norm:
        heads = (config.num_heads, config.num_kv_heads) if config.qk_norm_is_whole else (1, 1)
        norms |= {f"self_attn.{name}_norm.weight": n * config.head_dim for name, n in zip("qk", heads, strict=True)}
    if config.has_sinks:
        norms["self_attn.sinks"] = config.num_heads
    if config.latent is not None:
        norms[f"{LATENT_NORM}.weight"] = config.latent.rank
        if config.latent.query_rank:
            norms[f"{QUERY_NORM}.weight"] = config.latent.query_rank
    if config.index is not None and config.index.layers[layer]:
        norms |= {f"{INDEX_NORM}.{name}": config.index.dim for name in ("weight", "bias")}
    return norms


def choice_biases(config: ModelConfig, layer: int) -> dict[str, int]:
    """Return name -> width of the bias of a router's choice, which is kept in float32; nothing where there is none."""
    experts = config.experts
    if experts is None or not experts.routing.has_bias or not config.has_experts(layer):
        return {}
    return {f"{experts.module}.{experts.router}.e_score_correction_bias": experts.count}


def state_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a layer that keeps a state, beside norms and linear layers. All are kept
    in float32; nothing for a layer that attends."""
    delta = config.delta
    if delta is None or not config.keeps_state(layer):
        return {}
    return {
        DELTA_CONV: (delta.channels, 1, delta.kernel),
        DELTA_DECAY: (delta.value_heads,),
        DELTA_BIAS: (delta.value_heads,),
        DELTA_NORM: (delta.value_dim,),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that such a checkpoint must have (Hugging Face's names)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {}
        for linear in layer_linears(config, index):
            layer |= _stored_shapes(config, linear)
        layer |= {name: (width,) for name, width in (layer_norms(config, index) | choice_biases(config, index)).items()}
        layer |= state_tensors(config, index)
        shapes |= {f"{layer_prefix(index)}{name}": shape for name, shape in layer.items()}
    shapes |= {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
    for linear in model_linears(config):
        shapes |= {f"{MODEL_PREFIX}{name}": shape for name, shape in _stored_shapes(config, linear).items()}
    shapes |= {name: (width,) for name, width in model_norms(config).items()}
    if (inputs := config.layer_inputs) is not None:
        shapes[INPUT_TABLE] = (inputs.vocab_size, config.num_layers * inputs.dim)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def joint_tensors(config: ModelConfig) -> list[tuple[str, ...]]:
    """Return the names of tensors that run as one product, product by product: none of them can be replaced alone."""
    found: dict[tuple[str, ...], None] = {}
    for index in range(config.num_layers):
        prefix = layer_prefix(index)
        for linear in layer_linears(config, index):
            # All experts of a stacked tensor have the same names.
            found[tuple(f"{prefix}{name}" for name in _stored_shapes(config, linear))] = None
    if not config.tie_word_embeddings:
        found[EMBEDDING, LM_HEAD] = None
    return list(found)


def _stored_shapes(config: ModelConfig, linear: LayerLinear) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the checkpoint's tensors of a linear layer."""
    if linear.expert is not None and config.experts is not None:
        (name,), (outputs, inputs) = linear.parts, linear.shape
        return {name: (config.experts.count, inputs, outputs), f"{name}_bias": (config.experts.count, outputs)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in zip(linear.parts, linear.rows, strict=True):
        shapes[f"{name}.weight"] = (rows, linear.inputs)
        if linear.has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
