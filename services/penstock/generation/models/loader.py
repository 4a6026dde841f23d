"""From a checkpoint's tensors to a CausalLM: fuse, convert, pack, drop, one layer at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.base import HeadWeights
from penstock.generation.devices.memory import trim_heap
from penstock.generation.models.config import ModelConfig
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.layers import DecoderLayer, RMSNorm, SelfAttention, SwiGLU
from penstock.generation.models.rope import RotaryEmbedding
from penstock.generation.models.stored_weight import StoredWeight
from penstock.generation.quantization.base import NotFinite

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.models.checkpoint import Checkpoint
    from penstock.generation.quantization.base import Linear, Rows, Weight

_log = get_logger("penstock.generation")
EMBEDDING, LM_HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that such a checkpoint must have (Hugging Face's names)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


class Loader:
    """Builds one model. Every tensor of the checkpoint is taken exactly once."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._linear_method = device.linear_method(dtype, quantization)
        self._kernels = device.layer_kernels(dtype)
        self._num_bytes = 0

    def load(self) -> CausalLM:
        """Read, convert and pack everything."""
        shapes = tensor_shapes(self._config)
        num_parameters = sum(math.prod(shape) for shape in shapes.values())
        embedding, lm_head = self._embedding_and_head()
        layers = []
        for i in range(self._config.num_layers):
            layers.append(self._layer(i))
            # What was converted on the way to being packed: a third of a model otherwise stays in the heap.
            trim_heap()
        norm = self._norm(NORM)
        name = str(self._dtype).removeprefix("torch.")
        config = dataclasses.replace(self._config, dtype=name, num_parameters=num_parameters)
        device = self._device.torch_device
        return CausalLM(
            config,
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=lm_head,
            rotary=RotaryEmbedding(config.rope, config.head_dim, device, self._dtype),
            attention=self._device.attention(self._dtype, config.head_dim),
            dtype=self._dtype,
            device=device,
            num_bytes=self._num_bytes,
        )

    def _embedding_and_head(self) -> tuple[Rows, Linear]:
        """Tied as transformers 5.x ties: whichever tensor is there serves both; two that differ stay two."""
        there = [name for name in (EMBEDDING, LM_HEAD) if name in self._checkpoint]
        head = self._made(there[-1:], self._linear_method.head)
        is_one = len(there) == 1 or self._checkpoint.are_equal(*there)
        if self._config.tie_word_embeddings and not is_one:
            _log.warning("config.json ties the embeddings, but the checkpoint's two tensors differ: not tied")
        rows = head.rows() if is_one else None
        return rows or self._table(there[0]), head

    def _table(self, name: str) -> Rows:
        """An embedding in memory of its own."""
        stored = self._weight([name])
        table = stored.copied(self._device.weight_memory(stored.shape, stored.dtype))
        return partial(F.embedding, weight=self._counted_tensor(table))

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        q_norm, k_norm = (
            self._tensor(f"{prefix}self_attn.{name}_norm.weight") if config.qk_norm else None for name in "qk"
        )
        heads = HeadWeights(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm, config.rms_norm_eps)
        attention = f"{prefix}self_attn."
        qkv = self._fused([f"{attention}{name}_proj" for name in "qkv"], config.qkv_bias)
        output = self._fused([f"{attention}o_proj"], config.output_bias)
        gated = self._fused([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], config.mlp_bias, gated=True)
        down = self._fused([f"{prefix}mlp.down_proj"], config.mlp_bias)
        return DecoderLayer(
            self._norm(f"{prefix}input_layernorm.weight"),
            SelfAttention(config, index, qkv, output, heads),
            self._norm(f"{prefix}post_attention_layernorm.weight"),
            SwiGLU(gated, down),
        )

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensor(name), self._config.rms_norm_eps, self._kernels)

    def _fused(self, names: list[str], has_bias: bool, *, gated: bool = False) -> Linear:
        """One Linear with the outputs of all `names`, in order; `gated`: the first half gates the second."""
        bias = self._joined([f"{name}.bias" for name in names]) if has_bias else None
        method = self._linear_method
        return self._made(
            [f"{name}.weight" for name in names],
            lambda weight: method.gated(weight, bias, self._kernels) if gated else method.linear(weight, bias),
        )

    def _made(self, names: list[str], make: Callable[[Weight], Linear]) -> Linear:
        """The Linear of these tensors' rows. Raises StartupError naming the tensor that its format cannot hold."""
        weight = self._weight(names)
        try:
            linear = make(weight)
        except NotFinite as error:
            raise StartupError(
                f"{self._checkpoint.folder}: tensor {weight.tensor_of(error.row)} has a NaN or an infinite number, "
                "which no quantised weight can hold: --quantization none loads it as it is",
                flag="MODEL",
            ) from error
        self._num_bytes += linear.num_bytes
        return linear

    def _weight(self, names: list[str]) -> StoredWeight:
        return StoredWeight(self._checkpoint, names, self._dtype, self._device.torch_device)

    def _joined(self, names: list[str]) -> Tensor:
        """Small ones, in memory of their own, also where it is only one: a bias is used as it is by every method."""
        return torch.cat([self._converted(self._checkpoint.take(name)) for name in names])

    def _tensor(self, name: str) -> Tensor:
        return self._counted_tensor(self._owned(self._checkpoint.take(name)))

    def _counted_tensor(self, value: Tensor) -> Tensor:
        self._num_bytes += value.nbytes
        return value

    def _owned(self, value: Tensor) -> Tensor:
        """Converted, and never a view of the file, which may change on disk under a running server."""
        converted = self._converted(value)
        return converted.clone() if converted is value else converted

    def _converted(self, value: Tensor) -> Tensor:
        return value.to(device=self._device.torch_device, dtype=self._dtype)
