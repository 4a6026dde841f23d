"""Layers for multi-token prediction that a checkpoint carries after its last layer (DeepSeek-V3, arXiv 2412.19437;
Qwen3-Next and Qwen3.5).

Such a layer reads the final hidden state of a token and the embedding of the next one, joined by `eh_proj`, and is
otherwise one of the model's own decoder layers. Only the first is read: it drafts a chain by itself, as in vLLM and
SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.core.model_config import Activation, ModelConfig
from penstock.generation.models.draft_head import DraftHead, Embed
from penstock.generation.models.loader import LayerMaker, copied_bytes
from penstock.generation.weights.checkpoint_weights import CheckpointWeights, TensorSource
from penstock.generation.weights.draft_layers import (
    DRAFT_HEAD,
    DRAFT_NORM,
    DRAFT_TABLE,
    JOINT,
    NEXT_NORM,
    QWEN_JOINT,
    STATE_NORM,
)
from penstock.generation.weights.files import is_packed
from penstock.generation.weights.quantised.table import open_checkpoint
from penstock.generation.weights.stacked_experts import UnstackedExperts, stacked_shapes
from penstock.generation.weights.tensor_names import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    LayerLinear,
    layer_prefix,
    tensor_shapes,
)

if TYPE_CHECKING:
    from penstock.common.progress import CountBytes
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.models.decoder import CausalLM


class MultiTokenHead(DraftHead):
    """A multi-token-prediction layer in memory. What stands for the next row's final hidden state is its own, after
    `shared_head.norm`."""

    kind = "multi-token prediction"

    def __init__(self, model: CausalLM, weights: LayerWeights, device: Device, table: Tensor | None) -> None:
        """Take all weights, in the order of their use. `table`: an embedding of its own."""
        config, kernels = weights.config, device.layer_kernels(model.dtype)
        maker = LayerMaker(config, weights, kernels)
        rotaries = maker.rotaries(device)
        super().__init__(device.attention(model.dtype, config.head_dim), rotaries, kernels.stream_dtype(model.dtype))
        self.config, self.taps = config, (model.config.num_layers,)
        self.dtype, self.device, self.served_ids = model.dtype, device.torch_device, None
        hidden = config.hidden_size
        self._next_norm, self._state_norm = (
            maker.norm(f"{layer_prefix(0)}{name}.weight") for name in (NEXT_NORM, STATE_NORM)
        )
        joint = LayerLinear(JOINT, (JOINT,), (hidden,), 2 * hidden, has_bias=False)
        self._joint = weights.linear(layer_prefix(0), joint)
        self._layer = maker.layer(0)
        self._norm = maker.norm(f"{layer_prefix(0)}{DRAFT_NORM}")
        own = LayerLinear("shared_head.head", ("shared_head.head",), (config.vocab_size,), hidden, has_bias=False)
        self._shares_head = weights.shares_head
        self._head = model.head if weights.shares_head else weights.linear(layer_prefix(0), own)
        self._table = table
        self.num_bytes = weights.num_bytes + copied_bytes([self._layer]) + (0 if table is None else table.nbytes)
        self.num_parameters = weights.num_parameters

    @override
    def features(self, taps_TKI: Tensor) -> Tensor:
        return taps_TKI[:, 0]

    @override
    def embedded(self, ids_T: Tensor, embed: Embed) -> Tensor:
        return embed(ids_T) if self._table is None else F.embedding(ids_T, self._table)

    @override
    @torch.inference_mode()
    def forward(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        both = [self._next_norm(embeds_TI.contiguous()), self._state_norm(features_TI.contiguous())]
        stream_TI = self._joint(torch.cat(both, dim=-1)).to(self._stream)
        pending_TI = self._layer(stream_TI, None, self._step(positions_T, metadata, kv))
        return self._norm.add(stream_TI, pending_TI)

    @override
    def share(self, model: CausalLM) -> None:
        if self._shares_head:
            self._head = model.head

    @override
    @torch.inference_mode()
    def scores(self, hidden_NI: Tensor) -> Tensor:
        return self._head.as_float(hidden_NI.contiguous())


class LayerWeights:
    """loaded_weights.Weights of a checkpoint's first layer after the last one, as those of a model with one layer."""

    def __init__(
        self,
        folder: Path,
        served: ModelConfig,
        device: Device,
        dtype: torch.dtype,
        quantization: str,
        progress: CountBytes | None = None,
    ) -> None:
        """Open the checkpoint of the `served` model. Raises StartupError naming the tensor at fault."""
        experts = served.experts
        self.config = replace(
            served,
            num_layers=1,
            sliding_windows=(None,),
            layer_ropes=(),
            num_draft_layers=0,
            # It attends.
            delta=None,
            index=None if served.index is None else replace(served.index, layers=(True,)),
            # Dense layers are the first ones of a model.
            experts=None if experts is None else replace(experts, layers=(True,)),
        )
        self._prefix = layer_prefix(served.num_layers)
        source = open_checkpoint(folder, progress, draft_layer=served.num_layers)
        if f"{self._prefix}{JOINT}.weight" not in source:
            name = f"{self._prefix}{JOINT}.weight" if served.drafts_are_layers else QWEN_JOINT
            raise StartupError(f"{folder} lacks tensor {name}: it carries no layer for drafts", flag="MODEL")
        expected, places = stacked_shapes(self.config, self._shapes(), lambda name: self._own(name) in source)
        expected = {self._own(name): shape for name, shape in expected.items()}
        tables = {f"{self._prefix}{DRAFT_HEAD}": LM_HEAD, f"{self._prefix}{DRAFT_TABLE}": EMBEDDING}
        shape = (served.vocab_size, served.hidden_size)
        # Those that are the model's own are not read again.
        own = [name for name, same in tables.items() if name in source and not _are_one(source, name, same)]
        self.shares_head = f"{self._prefix}{DRAFT_HEAD}" not in own
        self.has_table = f"{self._prefix}{DRAFT_TABLE}" in own
        layers = range(served.num_layers + served.num_draft_layers)
        others = [layer_prefix(number) for number in layers if number != served.num_layers]
        for prefix in (*others, *(name for name in tables if name not in own), EMBEDDING, LM_HEAD, NORM):
            source.leave_out(prefix)
        source.check({**expected, **dict.fromkeys(own, shape)}, {})
        self.num_parameters = sum(map(math.prod, [*expected.values(), *[shape for _ in own]]))
        experts_of = {self._own(name): replace(row, tensor=self._own(row.tensor)) for name, row in places.items()}
        whole: TensorSource = UnstackedExperts(source, experts_of) if experts_of else source
        self._weights = CheckpointWeights(whole, device, dtype, quantization, is_tied=False, map_embeddings=False)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def num_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def mapped_bytes(self) -> int:
        return self._weights.mapped_bytes

    @property
    def forms(self) -> Mapping[str, int]:
        return self._weights.forms

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        """Raise RuntimeError: the layer has them apart."""
        raise RuntimeError("a layer for drafts has no head of a model")

    def table(self) -> Tensor | None:
        """Return an embedding of its own; None: it is the model's."""
        return self._weights.tensor(f"{self._prefix}{DRAFT_TABLE}") if self.has_table else None

    def token_table(self, name: str) -> Tensor:
        return self._weights.token_table(self._own(name))

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        return self._weights.linear(self._prefix, linear, activation)

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        return self._weights.matrix(self._prefix, linear)

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        return self._weights.tensor(self._own(name), is_exact=is_exact)

    def layer_is_complete(self) -> None:
        self._weights.layer_is_complete()

    def _own(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of the first layer."""
        return f"{self._prefix}{name.removeprefix(layer_prefix(0))}"

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors that the layer must have, as those of a first layer."""
        hidden, first = self.config.hidden_size, layer_prefix(0)
        shapes = {name: shape for name, shape in tensor_shapes(self.config).items() if name.startswith(first)}
        norms = (f"{NEXT_NORM}.weight", f"{STATE_NORM}.weight", DRAFT_NORM)
        shapes |= {f"{first}{name}": (hidden,) for name in norms}
        shapes[f"{first}{JOINT}.weight"] = (hidden, 2 * hidden)
        return shapes


def load_mtp(
    folder: Path, model: CausalLM, device: Device, quantization: str, progress: CountBytes | None = None
) -> MultiTokenHead:
    """Load the first layer for drafts of the checkpoint in `folder`, which `model` was read from. Raises StartupError
    naming what is missing."""
    served = model.config
    if not served.num_draft_layers:
        raise StartupError(
            f"{folder} has no layers for drafts that are known here: a native model with num_nextn_predict_layers in "
            "its config.json has, and one of Qwen3-Next or Qwen3.5"
        )
    if is_packed(folder):
        raise StartupError(f"{folder} is packed, and without its layers for drafts: give the checkpoint it was made of")
    weights = LayerWeights(folder, served, device, model.dtype, quantization, progress)
    return MultiTokenHead(model, weights, device, weights.table())


def _are_one(source: TensorSource, name: str, served_name: str) -> bool:
    """True when the layer's tensor has the numbers of the model's."""
    return served_name in source and source.are_equal(name, served_name)
