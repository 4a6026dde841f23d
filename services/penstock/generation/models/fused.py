"""All layers of a model, the last norm and a greedy draw in one call of the C++ kernels (csrc/decoder). Results have
the same bits as by the operators one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from penstock.generation.attention.native import NativeAttention
from penstock.generation.layers.decoder_layer import (
    AroundLayer,
    LayerNorm,
    NoNorm,
    ScaledLayer,
    SelfAttention,
    SwiGLU,
)
from penstock.generation.layers.delta_net import DeltaNet
from penstock.generation.layers.expert_choice import NativeChoice
from penstock.generation.layers.experts import MixtureOfExperts
from penstock.generation.layers.gated_attention import GatedAttention
from penstock.generation.layers.head_products import PackedProducts
from penstock.generation.layers.latent_attention import DirectQueries, LatentAttention, LowRankQueries
from penstock.generation.layers.latent_prompts import has_prompts
from penstock.generation.layers.layer_kernels import NativeKernels
from penstock.generation.layers.linear.native import Format, NativeLinear
from penstock.generation.layers.step_states import states_of_step

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.decoder_layer import DecoderLayer, RMSNorm
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.layers.rope import RotaryEmbedding
    from penstock.generation.layers.token_inputs import TokenInputs
    from penstock.generation.models.hidden_keeper import LayerTaps


class FusedLayers:
    """The fused layers. Threads go through them together; between two operations they wait at a barrier instead of
    being woken anew."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        rotaries: Sequence[RotaryEmbedding],
        table: Tensor | None,
        embedding_scale: float,
        dtype: torch.dtype,
        tokens: TokenInputs | None = None,
    ) -> None:
        """Take layers and head that `can_fuse` accepted. `table` is the embedding; None: it is the head's rows.
        `dtype`: the model's. `tokens`: what makes tokens' vectors for each layer; None: they have none."""
        last = cast(NativeLinear, head)
        # csrc/decoder/ops_decoder.cpp takes every one of these names and refuses others.
        sizes = {
            "gate": int(config.activation),
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "head_format": int(last.format),
            "vocab": last.out_features,
        }
        factors = {
            "eps": config.rms_norm_eps,
            "attention_scale": _attention_scale(layers),
            "softcap": config.attention_softcap,
            "embedding_scale": embedding_scale,
            "residual_scale": config.residual_scale,
            **_choice_factors(layers),
        }
        if config.latent is not None:
            factors["latent_eps"] = config.latent.eps
        end = {"norm": norm.weight, **named_parts("head", last)}
        if tokens is not None:
            sizes["token_format"] = int(cast(NativeLinear, tokens.product).format)
            factors |= {
                "token_product": tokens.norm.product_factor,
                "token_row": tokens.norm.row_factor,
                "token_sum": tokens.norm.factor,
            }
            end |= {"token_norm": tokens.norm.weight_D, **named_parts("token_product", tokens.product)}
        self.decoder: Any = torch.classes.penstock.Decoder(
            sizes,
            factors,
            [named_tensors(layer) for layer in layers],
            [own_sizes(layer) for layer in layers],
            end,
        )
        self._forward, self._decode = self.decoder.forward, self.decoder.decode
        self._rotaries = tuple(rotaries)
        self._keeps_states = config.delta is not None
        self._is_latent = config.latent is not None
        self.table = table
        self._token_table = None if tokens is None else tokens.table
        # Rows of taps are of this dtype and width.
        self._like_TI = torch.empty((0, config.hidden_size), dtype=dtype)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """False for a step that revises states, and for one with a prompt over compressed keys and values, which layers
        expand."""
        return not metadata.revises_states and not (self._is_latent and has_prompts(metadata))

    def __call__(
        self,
        hidden_TI: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
        table_rows_TX: Tensor | None = None,
        *,
        draws: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden_RI of `rows_R` (ascending; None: of all) after the final norm, for a step that it takes;
        overwrite the embeddings `hidden_TI` and fill `taps`. They may have rows after the final norm only where all are
        wanted. `table_rows_TX`: the rows of tokens' vectors, where layers have some.

        `draws`: also return for each row the id of its highest logit (R), the first of equals, -1 if that is not
        finite; else an empty tensor. An unwanted row ends with its keys and values in the last layer.
        """
        cos, sin = self._tables(metadata.max_context_len)
        result: tuple[Tensor, Tensor] = self._forward(
            hidden_TI,
            cos,
            sin,
            positions_T,
            metadata.slot_mapping if metadata.view_slots is None else metadata.view_slots,
            metadata.block_tables if metadata.view_tables is None else metadata.view_tables,
            metadata.query_start,
            metadata.context_lens,
            rows_R,
            draws,
            *kv.tensors,
            None if adapters is None else adapters.native,
            kv.places,
            None if taps is None else (list(taps.layers), taps.room(len(hidden_TI), hidden_TI)),
            table_rows_TX,
            _states(metadata, kv) if self._keeps_states else None,
        )
        return result

    def decode(
        self,
        ids: list[int],
        lengths: list[int],
        longest: int,
        tables: Tensor,
        kv: KVCachePool,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> list[int]:
        """Return the ids drawn after `ids`, one token of each sequence, which is `lengths` long with it. Not for layers
        that keep states. `tables` is as AttentionMetadata.block_tables, or view_tables, and may be wider. No adapter
        may change the embedding. Fill `taps`."""
        cos, sin = self._tables(longest)
        native = None if adapters is None else adapters.native
        tapped = None if taps is None else (list(taps.layers), taps.room(len(ids), self._like_TI))
        drawn: list[int] = self._decode(
            ids, lengths, tables, self.table, cos, sin, *kv.tensors, native, kv.places, tapped, self._token_table
        )
        return drawn

    def _tables(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return cos and sin of every rotary embedding, for positions below `length`."""
        found = [rotary.tables(length) for rotary in self._rotaries]
        return [cos for cos, _ in found], [sin for _, sin in found]


def can_fuse(
    config: ModelConfig,
    layers: Sequence[DecoderLayer],
    norm: RMSNorm,
    head: Linear,
    attention: object,
    tokens: TokenInputs | None = None,
) -> bool:
    """True when everything is native, no width needs padding, and every layer is of a kind that csrc/decoder knows."""
    if not layers or not isinstance(attention, NativeAttention) or not isinstance(head, NativeLinear):
        return False
    if config.is_parallel or config.qk_norm_is_whole or isinstance(norm, LayerNorm):
        return False
    # This may be a part of a layer that waits for its other parts.
    if not all(type(layer.mlp) is SwiGLU or _is_native_mixture(layer.mlp) for layer in layers):
        return False
    if tokens is not None and not isinstance(tokens.product, NativeLinear):
        return False
    if not all(type(layer.attention) in _KINDS for layer in layers):
        return False
    if not all(_has_packed_heads(layer) for layer in layers) or not _are_alike(layers):
        return False
    products: list[Linear] = [product for layer in layers for product in _products(layer).values()]
    products += [linear for layer in layers for expert in _experts_of(layer) for linear in expert]
    if not all(isinstance(product, NativeLinear) for product in products):
        return False
    widths = {config.hidden_size, *(cast(NativeLinear, product).in_features for product in products)}
    return isinstance(norm.kernels, NativeKernels) and all(width % 2 == 0 for width in widths)


# What a fused layer may have for its attention.
_KINDS = (SelfAttention, GatedAttention, DeltaNet, LatentAttention)


def _is_native_mixture(mlp: SwiGLU | MixtureOfExperts) -> bool:
    """True where csrc/decoder has every part."""
    if not isinstance(mlp, MixtureOfExperts) or not mlp.are_grouped or not isinstance(mlp.route, NativeChoice):
        return False
    scored = [mlp.router]
    if mlp.shared is not None and mlp.shared.gate is not None:
        scored.append(mlp.shared.gate)
    return all(isinstance(one, NativeLinear) and one.format in (Format.F32, Format.BF16) for one in scored)


def _are_alike(layers: Sequence[DecoderLayer]) -> bool:
    """True where all mixtures have the same sizes and formats: a step has one memory for all of them. In a quantised
    checkpoint the experts of some layers may not be converted."""
    found = [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)]
    return len({(*_mlp_sizes(one).items(), _router_format(one)) for one in found}) <= 1


def _router_format(mlp: MixtureOfExperts) -> Format:
    return cast(NativeLinear, mlp.router).format


def _has_packed_heads(layer: DecoderLayer) -> bool:
    attention = layer.attention
    if not isinstance(attention, LatentAttention):
        return True
    return isinstance(attention.keys, PackedProducts) and isinstance(attention.values, PackedProducts)


def _experts_of(layer: DecoderLayer) -> Sequence[tuple[Linear, Linear]]:
    return layer.mlp.experts if isinstance(layer.mlp, MixtureOfExperts) else ()


def _choice_factors(layers: Sequence[DecoderLayer]) -> dict[str, float]:
    """Return the factors of the choice of experts, the same in all layers that have some."""
    for layer in layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            choice = cast(NativeChoice, layer.mlp.route)
            return {"choice_least": choice.least, "choice_scale": choice.scale}
    return {}


def _attention_scale(layers: Sequence[DecoderLayer]) -> float:
    """Return the factor of the scores, the same in all layers that attend."""
    kinds = (layer.attention for layer in layers)
    return next(one.layer.scale for one in kinds if isinstance(one, SelfAttention | GatedAttention | LatentAttention))


def _states(metadata: AttentionMetadata, kv: KVCachePool) -> list[Tensor]:
    """Return the states of a step's sequences, as csrc/decoder/delta_layer.h has them."""
    assert kv.states is not None, "its pool has states"
    own = states_of_step(metadata)
    return [*kv.states.in_place(), own.slots, own.kept, own.is_new]


def own_sizes(layer: DecoderLayer) -> dict[str, int]:
    """Return a layer's numbers by the names that csrc/decoder knows: each product may have a format of its own."""
    attention = layer.attention
    sizes = _mlp_sizes(layer.mlp)
    if isinstance(attention, DeltaNet):
        heads = attention.heads
        sizes |= {
            "state_place": attention.place,
            "key_heads": heads.key_heads,
            "value_heads": heads.value_heads,
            "key_dim": heads.key_dim,
            "value_dim": heads.value_dim,
        }
    else:
        assert isinstance(attention, SelfAttention | GatedAttention | LatentAttention)
        own = attention.layer
        sizes |= {
            "window": own.window or 0,
            "turn": attention.turn,
            "num_kv_heads": own.num_kv_heads,
            "head_dim": own.head_dim,
            "keys": own.index,
        }
        if isinstance(attention, LatentAttention):
            sizes |= _latent_sizes(attention)
        else:
            sizes |= {
                "parts": own.parts,
                "norms_values": int(own.norms_values),
                "has_gates": int(isinstance(attention, GatedAttention)),
            }
    if isinstance(layer, ScaledLayer) and layer.own_input is not None:
        sizes["token_dim"] = layer.own_input.projection.in_features
    return sizes | {f"{name}.format": int(linear.format) for name, linear in _products(layer).items()}


def _mlp_sizes(mlp: SwiGLU | MixtureOfExperts) -> dict[str, int]:
    if isinstance(mlp, SwiGLU):
        return {"inner": mlp.down.in_features}
    down = cast(NativeLinear, mlp.experts[0][1])
    sizes = {"inner": down.in_features, "experts": len(mlp.experts), "experts.format": int(down.format)}
    if mlp.shared is not None:
        sizes["shared_inner"] = cast(NativeLinear, mlp.shared.down).in_features
        if mlp.shared.gate is not None:
            sizes["shared_is_gated"] = 1
    return sizes | {name: int(number) for name, number in cast(NativeChoice, mlp.route).numbers.items()}


def _latent_sizes(attention: LatentAttention) -> dict[str, int]:
    sizes = attention.sizes
    return {
        "rank": sizes.rank,
        "plain_dim": sizes.plain_dim,
        "turned_dim": sizes.turned_dim,
        "value_dim": sizes.value_dim,
        "query_rank": sizes.query_rank,
        "heads.format": int(cast(PackedProducts, attention.keys).format),
    }


def _products(layer: DecoderLayer) -> dict[str, NativeLinear]:
    """Return the products of a layer by name, without those of experts."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, SwiGLU):
        products = {"gated": mlp.gated, "down": mlp.down}
    else:
        products = {"router": mlp.router}
        if mlp.shared is not None:
            products |= {"shared.gated": mlp.shared.gated, "shared.down": mlp.shared.down}
            if mlp.shared.gate is not None:
                products["shared.gate"] = mlp.shared.gate
    if isinstance(attention, DeltaNet):
        products |= {"qkv": attention.rows, "numbers": attention.numbers, "output": attention.output}
    elif isinstance(attention, LatentAttention):
        queries = attention.queries
        products |= {"row": attention.row, "output": attention.output}
        if isinstance(queries, LowRankQueries):
            products |= {"qkv": queries.down, "query_up": queries.up}
        else:
            products["qkv"] = cast(DirectQueries, queries).linear
    else:
        assert isinstance(attention, SelfAttention | GatedAttention)
        products |= {"qkv": attention.qkv, "output": attention.output}
    if isinstance(layer, ScaledLayer) and layer.own_input is not None:
        products |= {"token_gate": layer.own_input.gate, "token_out": layer.own_input.projection}
    return cast("dict[str, NativeLinear]", products)


def named_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """Return a layer's tensors by the names that csrc/decoder knows, with the norms of the heads if the model has
    them, or those of a delta rule."""
    tensors: dict[str, Tensor] = {}
    for name, product in _products(layer).items():
        tensors |= named_parts(name, product)
    norms = {"input_norm": layer.input_norm, "post_attention_norm": layer.post_attention_norm}
    if isinstance(layer, AroundLayer):
        norms |= {"attention_out_norm": layer.attention_out, "mlp_out_norm": layer.mlp_out}
    if isinstance(layer, ScaledLayer):
        tensors["factor"] = torch.tensor([layer.factor])
        if layer.own_input is not None:
            norms["token_norm"] = layer.own_input.norm
    for number, (gated, down) in enumerate(_experts_of(layer)):
        tensors |= named_parts(f"expert.{number}.gated", gated) | named_parts(f"expert.{number}.down", down)
    if isinstance(layer.mlp, MixtureOfExperts):
        bias = cast(NativeChoice, layer.mlp.route).bias
        tensors |= {} if bias is None else {"choice_bias": bias}
    if isinstance(layer.attention, LatentAttention):
        norms["latent_norm"] = layer.attention.norm
        if isinstance(layer.attention.queries, LowRankQueries):
            norms["query_norm"] = layer.attention.queries.norm
    tensors |= {name: norm.weight for name, norm in norms.items() if not isinstance(norm, NoNorm)}
    if isinstance(layer.attention, DeltaNet):
        weights = layer.attention.weights
        rule = {"conv": weights.conv, "decay": weights.decay, "decay_bias": weights.bias, "state_norm": weights.norm}
        return tensors | rule
    if isinstance(layer.attention, LatentAttention):
        keys, values = (cast(PackedProducts, one).packed for one in (layer.attention.keys, layer.attention.values))
        return tensors | {"head_keys": keys, "head_values": values}
    own = cast(SelfAttention, layer.attention).layer
    others = {"q_norm": own.q_norm, "k_norm": own.k_norm, "sinks": own.sinks}
    return tensors | {name: weight for name, weight in others.items() if weight is not None}


def named_parts(name: str, linear: Linear) -> dict[str, Tensor]:
    """Return `name`.weight and, if the format has them, .bias, .scale, .sum and .offset."""
    return {f"{name}.{part}": tensor for part, tensor in cast(NativeLinear, linear).packed.parts().items()}
