"""DFlash heads (Chen et al. 2026, arXiv 2602.06036), as folders on the hub have them.

A head makes a whole block of drafts in one pass. It has a few decoder layers of Qwen3's kind. Every layer keeps keys
and values of the served model's rows, made of hidden states that `fc` joins. A block is the last token and then a mask
token for each draft; its rows see all rows before the block, and each other. Embedding and scores are the served
model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionLayer, AttentionMetadata, rotate
from penstock.generation.core.model_config import CONFIG_FILE, ConfigReader, ModelConfig, read_json
from penstock.generation.layers.decoder_layer import RMSNorm, SwiGLU
from penstock.generation.layers.rope import RotaryEmbedding
from penstock.generation.models.dense_families import QWEN3
from penstock.generation.models.draft_head import BlockHead
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.safetensors_folder import Checkpoint
from penstock.generation.weights.tensor_names import LayerLinear

if TYPE_CHECKING:
    from penstock.common.progress import CountBytes
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.models.decoder import CausalLM

# `architectures` of folders with such a head, by its authors and by trainers.
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
# Others of its family, which have parts that are not known here.
_OTHERS = {
    "DFlash2DraftModel": "convolutions and a selector of candidates",
    "DSparkDraftModel": "a Markov head",
    "DominoDraftModel": "a recurrent correction",
}
# Object in config.json with the fields of the block, which may also stand beside it.
_FIELDS = "dflash_config"
_BLOCK_SIZE = 16
# Fields that change what the head computes, and the values that are supported.
_ONLY: dict[str, tuple[object, ...]] = {
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa", "mha"),
    "input_embedding_scale": (None, 1, 1.0),
}
_SLIDING = "sliding_attention"


def is_dflash(folder: Path) -> bool:
    """True for a folder with a head of this family, of a supported kind or not."""
    named = read_json(folder / CONFIG_FILE).get("architectures")
    return isinstance(named, list) and any(name in ARCHITECTURES or name in _OTHERS for name in named)


class DFlashConfig:
    """config.json of a DFlash folder, checked. Errors are StartupErrors that name file and field."""

    def __init__(self, folder: Path) -> None:
        """Read it. Raises StartupError."""
        reader = ConfigReader(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
        nested = reader.mapping(_FIELDS) or ConfigReader({}, reader.source, f"{_FIELDS}.")
        # A field in the object counts before one beside it.
        own = ConfigReader({**reader.values, **nested.values}, reader.source)
        self._check_kind(reader, own)
        if (kind := reader.text("model_type", QWEN3.model_type)) != QWEN3.model_type:
            raise reader.error("model_type", f"{kind!r}: supported is a head with layers of {QWEN3.model_type!r}")
        empty = ConfigReader({}, reader.source)
        self.layers: ModelConfig = QWEN3.model_config(reader, empty)
        self.block_size = own.integer("block_size", _BLOCK_SIZE, minimum=2)
        self.mask_id = own.integer("mask_token_id", minimum=0)
        taps = own.whole_numbers("target_layer_ids")
        if not taps:
            raise own.error("target_layer_ids", "is missing: it numbers the layers that the head reads")
        # They number layers, and the state after each is meant.
        self.taps = tuple(layer + 1 for layer in taps)
        self.factor = own.number("output_multiplier", 1.0)
        self.softcap = own.number("final_logit_softcapping") if own.values.get("final_logit_softcapping") else 0.0
        self.is_causal = tuple(self._causal(own, index) for index in range(self.layers.num_layers))

    def _causal(self, own: ConfigReader, index: int) -> bool:
        """True when the rows of a block see those before alone. A window without that would have two sides."""
        slides = self.layers.sliding_windows[index] is not None
        named = next((name for name in ("causal", "is_causal") if own.has(name)), None)
        is_causal = slides if named is None else own.boolean(named, slides)
        if slides and not is_causal:
            raise own.error(named or "causal", f"must be true where layers have a window ({_SLIDING})")
        return is_causal

    @staticmethod
    def _check_kind(reader: ConfigReader, own: ConfigReader) -> None:
        named = reader.values.get("architectures")
        names = named if isinstance(named, list) else []
        if not any(name in ARCHITECTURES for name in names):
            known = [f"{name} has {part}" for name, part in _OTHERS.items() if name in names]
            said = f"{known[0]}, which are not read here" if known else f"{names!r}"
            raise reader.error("architectures", f"{said}: supported is {ARCHITECTURES[0]}")
        for name, values in _ONLY.items():
            if own.values.get(name) not in values:
                raise own.error(name, f"{own.values[name]!r}: no other DFlash head is supported")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parts of a layer: queries apart from keys and values, which the served model's rows have as well."""

    input_norm: RMSNorm
    facts: AttentionLayer
    query: Linear
    keys_values: Linear
    output: Linear
    post_norm: RMSNorm
    mlp: SwiGLU
    is_causal: bool


class DFlashHead(BlockHead):
    """A DFlash head in memory."""

    kind = "DFlash"
    served_ids = None

    def __init__(self, config: DFlashConfig, weights: _Weights, device: Device, model: CausalLM) -> None:
        """Take all weights, in the order of their use."""
        layers, kernels = config.layers, device.layer_kernels(weights.dtype)
        rotary = RotaryEmbedding(
            layers.rope,
            layers.head_dim,
            device.torch_device,
            weights.dtype,
            max_positions=layers.max_position_embeddings,
        )
        super().__init__(
            device.attention(weights.dtype, layers.head_dim), [rotary], kernels.stream_dtype(weights.dtype)
        )
        self.config, self.taps = layers, config.taps
        self.num_layers, self.num_drafts, self.mask_id = layers.num_layers, config.block_size - 1, config.mask_id
        self.dtype, self.device = weights.dtype, device.torch_device
        self._factor, self._softcap = config.factor, config.softcap

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{name}.weight"), layers.rms_norm_eps, kernels)

        self._fc = weights.linear("", _joint(config))
        self._hidden_norm = norm("hidden_norm")
        self._layers = [self._layer(config, weights, index, norm) for index in range(layers.num_layers)]
        self._norm = norm("norm")
        self._head = model.head
        self.num_bytes, self.num_parameters = weights.num_bytes, weights.num_parameters

    @staticmethod
    def _layer(config: DFlashConfig, weights: _Weights, index: int, norm: Any) -> _Layer:
        layers, prefix = config.layers, _prefix(index)
        query, keys_values, output, gated, down = (weights.linear(prefix, one) for one in _layer_linears(layers))
        q_norm, k_norm = (weights.tensor(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        facts = AttentionLayer(
            layers.num_heads,
            layers.num_kv_heads,
            layers.head_dim,
            layers.head_dim**-0.5,
            index,
            layers.sliding_windows[index],
            q_norm=q_norm,
            k_norm=k_norm,
            eps=layers.rms_norm_eps,
        )
        before, after = norm(f"{prefix}input_layernorm"), norm(f"{prefix}post_attention_layernorm")
        mlp = SwiGLU(index, gated, down)
        return _Layer(before, facts, query, keys_values, output, after, mlp, config.is_causal[index])

    @override
    def features(self, taps_TKI: Tensor) -> Tensor:
        return self._hidden_norm(self._fc(taps_TKI.flatten(1)))

    @override
    @torch.inference_mode()
    def forward(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        """See DraftHead: nothing is computed of the served model's rows but their keys and values."""
        ((cos, sin),) = self._step(positions_T, metadata, kv).turns
        for layer in self._layers:
            facts = layer.facts
            heads_T2D = layer.keys_values(features_TI).view(len(features_TI), -1, facts.head_dim)
            k_TKD, v_TKD = heads_T2D[:, : facts.num_kv_heads], heads_T2D[:, facts.num_kv_heads :]
            assert facts.k_norm is not None
            normed = F.rms_norm(k_TKD.to(facts.k_norm.dtype), (facts.head_dim,), None, facts.eps) * facts.k_norm
            turned_TKD = rotate(normed.to(v_TKD.dtype), cos, sin)
            kv.write(facts.index, metadata.slot_mapping, turned_TKD, v_TKD.contiguous())
        return features_TI

    @override
    @torch.inference_mode()
    def block(self, embeds_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool) -> Tensor:
        step = self._step(positions_T, metadata, kv)
        ((cos, sin),) = step.turns
        open_rows = None if all(layer.is_causal for layer in self._layers) else _seeing_all(metadata)
        stream_TI, pending_TI = embeds_TI.to(self._stream, copy=True), None
        for layer in self._layers:
            normed_TI = layer.input_norm.add(stream_TI, pending_TI)
            qkv_TE = torch.cat([layer.query(normed_TI), layer.keys_values(normed_TI)], dim=-1)
            rows = metadata if layer.is_causal or open_rows is None else open_rows
            out_THD = self._attention.forward_qkv(qkv_TE, cos, sin, layer.facts, rows, kv)
            attended_TI = step.addend(layer.output, out_THD.flatten(1), layer.facts.index, 0)
            pending_TI = layer.mlp(layer.post_norm.add(stream_TI, attended_TI), step)
        return self._norm.add(stream_TI, pending_TI)

    @override
    @torch.inference_mode()
    def scores(self, hidden_NI: Tensor) -> Tensor:
        scores_NV = self._head.as_float(hidden_NI.contiguous())
        if self._factor != 1.0:
            scores_NV = scores_NV * self._factor
        return scores_NV if not self._softcap else (scores_NV / self._softcap).tanh() * self._softcap

    @override
    def share(self, model: CausalLM) -> None:
        self._head = model.head


def _seeing_all(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the rows as sequences of one row each that see as far as the last row of their own."""
    counts = torch.tensor(metadata.query_lens, device=metadata.context_lens.device)
    own_T = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return replace(
        metadata,
        query_start=torch.arange(len(own_T) + 1, dtype=torch.int32, device=counts.device),
        context_lens=metadata.context_lens[own_T],
        block_tables=metadata.block_tables[own_T],
        query_lens=[1] * len(own_T),
        kv_lens=[
            length for length, count in zip(metadata.kv_lens, metadata.query_lens, strict=True) for _ in range(count)
        ],
        plans={},
    )


class _Weights:
    """Tensors of a DFlash folder, checked against its config.json."""

    def __init__(
        self,
        folder: Path,
        config: DFlashConfig,
        device: Device,
        dtype: torch.dtype,
        quantization: str,
        progress: CountBytes | None = None,
    ) -> None:
        """Open the folder. `dtype`: the served model's. Raises StartupError naming the tensor at fault."""
        source, expected = Checkpoint(folder, progress), _shapes(config)
        source.check(expected, {})
        self.dtype = dtype
        self._weights = CheckpointWeights(source, device, dtype, quantization, is_tied=False, map_embeddings=False)
        self.num_parameters = sum(math.prod(shape) for shape in expected.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of the parts so far."""
        return self._weights.num_bytes

    def linear(self, prefix: str, linear: LayerLinear) -> Linear:
        """Return a linear layer."""
        return self._weights.linear(prefix, linear)

    def tensor(self, name: str) -> Tensor:
        """Return the weight of a norm."""
        return self._weights.tensor(name)


def load_dflash(
    folder: Path, model: CausalLM, device: Device, quantization: str, progress: CountBytes | None = None
) -> DFlashHead:
    """Load the head of a folder for the served `model`. Raises StartupError naming file, field or tensor."""
    config, served = DFlashConfig(folder), model.config
    file, layers = folder / CONFIG_FILE, config.layers
    if layers.hidden_size != served.hidden_size:
        raise StartupError(
            f"{file}: the head reads hidden states of {layers.hidden_size} numbers, and the served model's have "
            f"{served.hidden_size}"
        )
    if max(config.taps) > served.num_layers:
        raise StartupError(
            f"{file}: target_layer_ids {[tap - 1 for tap in config.taps]}: the served model has {served.num_layers} "
            "layers"
        )
    if config.mask_id >= served.vocab_size:
        raise StartupError(f"{file}: mask_token_id {config.mask_id}: the served model has {served.vocab_size} ids")
    if served.embedding_scale != 1.0:
        raise StartupError(f"{folder}: a head of this kind cannot draft for a model with a factor on its embedding")
    return DFlashHead(config, _Weights(folder, config, device, model.dtype, quantization, progress), device, model)


def _prefix(index: int) -> str:
    return f"layers.{index}."


def _joint(config: DFlashConfig) -> LayerLinear:
    hidden = config.layers.hidden_size
    return LayerLinear("fc", ("fc",), (hidden,), len(config.taps) * hidden, has_bias=False)


def _layer_linears(layers: ModelConfig) -> Sequence[LayerLinear]:
    hidden, inner = layers.hidden_size, layers.intermediate_size
    query, kv = layers.num_heads * layers.head_dim, layers.num_kv_heads * layers.head_dim
    q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    return (
        LayerLinear(q, (q,), (query,), hidden, layers.qkv_bias),
        LayerLinear("self_attn.kv_proj", (k, v), (kv, kv), hidden, layers.qkv_bias),
        LayerLinear(o, (o,), (hidden,), query, layers.output_bias),
        LayerLinear("mlp.gate_up_proj", (gate, up), (inner, inner), hidden, has_bias=False, gated=True),
        LayerLinear(down, (down,), (hidden,), inner, has_bias=False),
    )


def _shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that a folder must have."""
    layers, hidden, dim = config.layers, config.layers.hidden_size, config.layers.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for prefix in map(_prefix, range(layers.num_layers)):
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        for linear in _layer_linears(layers):
            for name, rows in zip(linear.parts, linear.rows, strict=True):
                shapes[f"{prefix}{name}.weight"] = (rows, linear.inputs)
                if linear.has_bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes
