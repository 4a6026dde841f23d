"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), as folders on the hub have them.

A head has one decoder layer of Llama's kind. Its attention reads the embedding of the next token beside three hidden
states of the served model, joined to one by `fc`. It scores a part of the vocabulary: `d2t` holds the served model's
ids, less the head's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionLayer
from penstock.generation.core.model_config import CONFIG_FILE, ConfigReader, ModelConfig, read_json
from penstock.generation.devices.torch_dtypes import STORED_DTYPES
from penstock.generation.layers.decoder_layer import RMSNorm, SelfAttention, SwiGLU
from penstock.generation.layers.rope import RotaryEmbedding
from penstock.generation.models.dense_families import LLAMA
from penstock.generation.models.draft_head import DraftHead, Embed
from penstock.generation.models.fused_head import ChainLimits, HeadParts, fused_head, served_embedding
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.safetensors_folder import Checkpoint
from penstock.generation.weights.tensor_names import LayerLinear

if TYPE_CHECKING:
    from penstock.common.progress import CountBytes
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.models.decoder import CausalLM

# `architectures` of folders with such a head: SafeAILab's and SGLang's trainers, and vLLM's speculators.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
NUM_TAPS = 3
# Prefixes of the layer's tensors: of SafeAILab and SGLang, of vLLM's speculators.
_LAYERS = ("midlayer.", "layers.0.")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
# Fields that change what the head computes, and the only value that is supported.
_ONLY = {"num_hidden_layers": 1, "parallel_drafting": False, "fc_norm": False, "norm_before_fc": False}
_INTEGERS = ("I64", "I32")


class Eagle3Config:
    """config.json of an EAGLE-3 folder, checked. Errors are StartupErrors that name file and field."""

    def __init__(self, folder: Path) -> None:
        """Read it. Raises StartupError."""
        reader = ConfigReader(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
        self._check_kind(reader)
        layer = reader.mapping("transformer_layer_config") or reader
        values = {**layer.values, "num_hidden_layers": 1}
        if (kind := layer.text("model_type", "llama")) != LLAMA.model_type:
            raise layer.error("model_type", f"{kind!r}: supported is a head with a layer of {LLAMA.model_type!r}")
        for name, only in _ONLY.items():
            if any(one.values.get(name, only) not in (only, None) for one in (reader, layer)):
                raise reader.error(name, f"must be {str(only).lower()}: no other EAGLE-3 head is supported")
        empty = ConfigReader({}, reader.source)
        self.layer: ModelConfig = LLAMA.model_config(ConfigReader(values, layer.source, layer.prefix), empty)
        self.draft_vocab = reader.integer("draft_vocab_size", self.layer.vocab_size)
        self.target_hidden = reader.integer("target_hidden_size", self.layer.hidden_size)
        # The residual stream begins after `hidden_norm`, not before it.
        self.norm_before_residual = reader.boolean("norm_before_residual", False)
        self._taps = self._read_taps(reader)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the tapped hidden states of a model with this many layers, numbered as transformers' hidden_states.

        The default is EAGLE's own: a low, a middle and a high layer. Raises StartupError.
        """
        taps = self._taps or (2, num_layers // 2, num_layers - 3)
        if len(taps) != NUM_TAPS or not all(0 <= tap <= num_layers for tap in taps):
            raise StartupError(
                f"the head taps the hidden states {list(taps)} of a model, and this one has {num_layers} layers"
            )
        return taps

    @staticmethod
    def _check_kind(reader: ConfigReader) -> None:
        named = reader.values.get("architectures")
        names = named if isinstance(named, list) else []
        # The first published heads call themselves by the architecture of their layer.
        if not any(name in ARCHITECTURES for name in names) and not reader.has("draft_vocab_size"):
            raise reader.error("architectures", f"{names!r}: supported are {', '.join(ARCHITECTURES)}")
        nested = reader.mapping("eagle_config")
        if nested is not None and not nested.boolean("use_aux_hidden_state", True):
            raise nested.error("use_aux_hidden_state", "must be true: a head without taps is no EAGLE-3 head")

    @staticmethod
    def _read_taps(reader: ConfigReader) -> tuple[int, ...] | None:
        """Read the taps; None: the default.

        In `eagle_config` they number layers, and the state after the layer is meant (SGLang 0.5). Elsewhere they
        number hidden states, 0 being the embedding (vLLM 0.11).
        """
        name, nested = "eagle_aux_hidden_state_layer_ids", reader.mapping("eagle_config")
        if (own := reader.whole_numbers(name)) is not None:
            return own
        after = None if nested is None else nested.whole_numbers(name)
        return None if after is None else tuple(layer + 1 for layer in after)


class Eagle3Head(DraftHead):
    """An EAGLE-3 head in memory."""

    kind = "EAGLE-3"

    def __init__(self, config: Eagle3Config, taps: tuple[int, ...], weights: Eagle3Weights, device: Device) -> None:
        """Take all weights, in the order of their use."""
        layer, kernels = config.layer, device.layer_kernels(weights.dtype)
        rotary = RotaryEmbedding(
            layer.rope,
            layer.head_dim,
            device.torch_device,
            weights.dtype,
            max_positions=layer.max_position_embeddings,
        )
        stream = kernels.stream_dtype(weights.dtype)
        super().__init__(device.attention(weights.dtype, layer.head_dim), [rotary], stream)
        self.config, self.taps = layer, taps
        self.dtype, self.device = weights.dtype, device.torch_device
        self._norm_before_residual = config.norm_before_residual
        self._fc = weights.linear("", _joint(config, has_bias=weights.has_fc_bias))
        self._input_norm, self._hidden_norm, self._post_norm = (
            RMSNorm(weights.tensor(f"{weights.layer}{name}.weight"), layer.rms_norm_eps, kernels) for name in _NORMS
        )
        facts = AttentionLayer(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim**-0.5, 0, None)
        qkv, output, gated, down = (weights.linear(weights.layer, one) for one in _layer_linears(config))
        self._attend = SelfAttention(facts, qkv, output)
        self._mlp = SwiGLU(0, gated, down)
        self._norm = RMSNorm(weights.tensor("norm.weight"), layer.rms_norm_eps, kernels)
        self._lm_head = weights.linear("", _scores(config))
        self._table = weights.table()
        parts = HeadParts(
            self._input_norm,
            self._hidden_norm,
            self._attend,
            self._post_norm,
            self._mlp,
            self._norm,
            self._lm_head,
            config.norm_before_residual,
        )
        self._fused = fused_head(layer, parts, rotary, self._attention)
        # Of drafts; None: none that the fused layer can read.
        self._embedding: tuple[Any, Tensor | None] | None = None
        if self._fused is not None and self._table is not None:
            self._embedding = self._fused.decoder, self._table
        self.served_ids = weights.served_ids(device.torch_device)
        self.num_bytes, self.num_parameters = weights.num_bytes, weights.num_parameters

    @property
    def has_embedding(self) -> bool:
        """True: it has an embedding of its own, in place of the served model's."""
        return self._table is not None

    @override
    def features(self, taps_TKI: Tensor) -> Tensor:
        return self._fc(taps_TKI.flatten(1))

    @override
    def embedded(self, ids_T: Tensor, embed: Embed) -> Tensor:
        return embed(ids_T) if self._table is None else F.embedding(ids_T, self._table)

    @override
    @torch.inference_mode()
    def forward(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        step = self._step(positions_T, metadata, kv)
        normed_TI = self._hidden_norm(features_TI.contiguous())
        stream_TI = (normed_TI if self._norm_before_residual else features_TI).to(self._stream, copy=True)
        both_T2I = torch.cat([self._input_norm(embeds_TI.contiguous()), normed_TI], dim=-1)
        pending_TI = self._mlp(self._post_norm.add(stream_TI, self._attend(both_T2I, step)), step)
        return (stream_TI + pending_TI).to(self.dtype)

    @override
    @torch.inference_mode()
    def scores(self, hidden_NI: Tensor) -> Tensor:
        return self._lm_head.as_float(self._norm(hidden_NI.contiguous()))

    @override
    @torch.inference_mode()
    def step(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> tuple[Tensor, Tensor]:
        if self._fused is None:
            return super().step(embeds_TI, features_TI, positions_T, metadata, kv)
        return self._fused.step(embeds_TI, features_TI, positions_T, metadata, kv)

    @property
    @override
    def can_chain(self) -> bool:
        return self._fused is not None and self._embedding is not None

    @override
    @torch.inference_mode()
    def chain(
        self,
        embeds_TI: Tensor,
        features_TI: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        tables_SB: Tensor,
        kv: KVCachePool,
        limits: Sequence[ChainLimits],
    ) -> list[list[int]]:
        if self._fused is None or self._embedding is None:
            return super().chain(embeds_TI, features_TI, positions_T, metadata, tables_SB, kv, limits)
        rows = (embeds_TI, features_TI, positions_T, metadata, tables_SB, kv)
        return self._fused.chain(*rows, self._embedding, self.served_ids, limits)

    @override
    def share(self, model: CausalLM) -> None:
        if self._table is None and self._fused is not None:
            self._embedding = served_embedding(model.fused)


class Eagle3Weights:
    """Tensors of an EAGLE-3 folder by the names of its layout, checked against its config.json."""

    def __init__(
        self,
        folder: Path,
        config: Eagle3Config,
        device: Device,
        dtype: torch.dtype,
        quantization: str,
        served_vocab: int,
        progress: CountBytes | None = None,
    ) -> None:
        """Open the folder. `dtype`: the served model's. Raises StartupError naming the tensor at fault."""
        source = Checkpoint(folder, progress)
        self.layer = next((one for one in _LAYERS if f"{one}hidden_norm.weight" in source), _LAYERS[0])
        self.has_fc_bias = "fc.bias" in source
        expected, optional = _shapes(config, self.layer)
        source.check(expected, optional, {"d2t": _INTEGERS, "t2d": ("BOOL", *_INTEGERS, *STORED_DTYPES)})
        self._source = source
        self._config, self._served_vocab = config, served_vocab
        self.dtype = dtype
        self._weights = CheckpointWeights(source, device, dtype, quantization, is_tied=False, map_embeddings=False)
        shapes = {**expected, **{name: shape for name, shape in optional.items() if name in source}}
        self.num_parameters = sum(math.prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d"))

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

    def table(self) -> Tensor | None:
        """Return the head's own embedding; None: it has none, and reads the served model's."""
        return self._weights.tensor("embed_tokens.weight") if "embed_tokens.weight" in self._source else None

    def served_ids(self, device: torch.device) -> Tensor | None:
        """Return the served model's id of each score; None: they are the same. Raises StartupError for an id that the
        served model does not have."""
        ids = torch.arange(self._config.draft_vocab)
        if "d2t" in self._source:
            ids = ids + self._source.take("d2t").to(torch.int64)
        elif self._config.draft_vocab != self._config.layer.vocab_size:
            raise StartupError(f"{self._source.folder} lacks tensor d2t, which says what ids the scores are of")
        if int(ids.min()) < 0 or int(ids.max()) >= self._served_vocab or len(set(ids.tolist())) != len(ids):
            raise StartupError(
                f"{self._source.folder}: tensor d2t must name {len(ids)} different ids of the served model, which has "
                f"{self._served_vocab}"
            )
        if torch.equal(ids, torch.arange(self._served_vocab)):
            return None
        return ids.to(device)


def load_eagle3(
    folder: Path,
    served: ModelConfig,
    device: Device,
    dtype: torch.dtype,
    quantization: str,
    progress: CountBytes | None = None,
) -> Eagle3Head:
    """Load the head of a folder for a served model in `dtype`. Raises StartupError naming file, field or tensor."""
    config = Eagle3Config(folder)
    taps = config.taps(served.num_layers)
    if config.target_hidden != served.hidden_size:
        raise StartupError(
            f"{folder / CONFIG_FILE}: the head reads hidden states of {config.target_hidden} numbers, and the served "
            f"model's have {served.hidden_size}"
        )
    weights = Eagle3Weights(folder, config, device, dtype, quantization, served.vocab_size, progress)
    head = Eagle3Head(config, taps, weights, device)
    own, rows = config.layer.hidden_size, config.layer.vocab_size
    if head.has_embedding and rows < served.vocab_size:
        raise StartupError(
            f"{folder}: tensor embed_tokens.weight has {rows} rows (vocab_size), and the served model "
            f"{served.vocab_size} ids"
        )
    if own != served.hidden_size and not head.has_embedding:
        raise StartupError(f"{folder} lacks tensor embed_tokens.weight: the served model's is not {own} wide")
    return head


def _joint(config: Eagle3Config, *, has_bias: bool) -> LayerLinear:
    return LayerLinear("fc", ("fc",), (config.layer.hidden_size,), NUM_TAPS * config.target_hidden, has_bias)


def _scores(config: Eagle3Config) -> LayerLinear:
    return LayerLinear("lm_head", ("lm_head",), (config.draft_vocab,), config.layer.hidden_size, has_bias=False)


def _layer_linears(config: Eagle3Config) -> tuple[LayerLinear, ...]:
    layer = config.layer
    hidden, query, kv = layer.hidden_size, layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate, up, down = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    inner = layer.intermediate_size
    return (
        LayerLinear("self_attn.qkv_proj", parts, (query, kv, kv), 2 * hidden, layer.qkv_bias),
        LayerLinear("self_attn.o_proj", ("self_attn.o_proj",), (hidden,), query, layer.output_bias),
        LayerLinear("mlp.gate_up_proj", (gate, up), (inner, inner), hidden, layer.mlp_bias, gated=True),
        LayerLinear(down, (down,), (hidden,), inner, layer.mlp_bias),
    )


def _shapes(config: Eagle3Config, prefix: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return name -> shape of the tensors that a folder must have, and of those that it may have."""
    layer = config.layer
    hidden, vocab = layer.hidden_size, layer.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab, hidden)}
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in _NORMS}
    shapes["fc.weight"] = (hidden, NUM_TAPS * config.target_hidden)
    for linear in _layer_linears(config):
        for name, rows in zip(linear.parts, linear.rows, strict=True):
            shapes[f"{prefix}{name}.weight"] = (rows, linear.inputs)
            if linear.has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    optional = {"fc.bias": (hidden,), "d2t": (config.draft_vocab,), "t2d": (vocab,)}
    return shapes, {**optional, "embed_tokens.weight": (vocab, hidden)}
