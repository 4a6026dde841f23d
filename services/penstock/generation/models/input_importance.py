"""Importance of the inputs of every matrix, for int4: the mean square of each when ids drawn at random go through the
model. No data is needed: on real models it is as good as text (dev/log/real-weights.md).

One layer is in memory at a time, in the model's dtype. The result is a few vectors a layer; importance_cache.py files
it, and later starts read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.attention.state_pool import new_states
from penstock.generation.core.model_config import Activation, ModelConfig
from penstock.generation.layers.decoder_layer import Step
from penstock.generation.layers.delta_net import state_layout
from penstock.generation.layers.linear.base import Linear
from penstock.generation.models.loader import LayerMaker, attention_of
from penstock.generation.sampling.ops.seeded_generator import seeded_generator
from penstock.generation.weights.tensor_names import LayerLinear, layer_linears, layer_prefix

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.weights.checkpoint_weights import CheckpointWeights

# Ids that are read, in sequences of this many, and the seed that draws them.
NUM_IDS, SEQUENCE, SEED = 512, 256, 35
_BLOCK_SIZE = 16
# An expert that fewer rows reach has the inputs of all.
_LEAST_ROWS = 16


@torch.inference_mode()
def measure_importance(config: ModelConfig, weights: CheckpointWeights, device: Device) -> dict[str, Tensor]:
    """Return the mean square of each input, float32 (inputs), of every matrix of the layers that a format may round, by
    its name. `weights` are the whole model's, in a dtype; their layers are asked for."""
    recorder = _RecordingWeights(weights)
    kernels = device.layer_kernels(weights.dtype)
    maker, stream = LayerMaker(config, recorder, kernels), kernels.stream_dtype(weights.dtype)
    ids = torch.randint(config.vocab_size, (NUM_IDS,), generator=seeded_generator(SEED))
    hidden = weights.embedded(ids.tolist()) * float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
    hidden = hidden.to(stream)
    step = _step(config, maker, weights.dtype, stream, device)
    found: dict[str, Tensor] = {}
    pending: Tensor | None = None
    for index in range(config.num_layers):
        pending = maker.layer(index)(hidden, pending, step)
        found |= recorder.take(config, index)
    return found


class _Recorded(Linear):
    """A linear layer that sums up the squares of its inputs."""

    def __init__(self, linear: Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear
        self.squares = torch.zeros(linear.in_features)
        self.num_rows = 0

    def __call__(self, x_TI: Tensor) -> Tensor:
        self._record(x_TI)
        return self._linear(x_TI)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        self._record(x_TI)
        return self._linear.as_float(x_TI)

    def _record(self, x_TI: Tensor) -> None:
        self.squares += x_TI.float().square().sum(0).cpu()
        self.num_rows += len(x_TI)

    @property
    @override
    def num_bytes(self) -> int:
        return self._linear.num_bytes


class _RecordingWeights:
    """loader.Weights with layers that record."""

    def __init__(self, weights: CheckpointWeights) -> None:
        self.dtype = weights.dtype
        # Of no interest: the weights are here for a moment.
        self.num_bytes = 0
        self._weights = weights
        self._recorded: dict[str, _Recorded] = {}

    @property
    def mapped_bytes(self) -> int:
        return 0

    @property
    def forms(self) -> Mapping[str, int]:
        return self._weights.forms

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        return self._weights.head_and_table()

    def token_table(self, name: str) -> Tensor:
        return self._weights.token_table(name)

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        made = self._weights.linear(prefix, linear, activation)
        if linear.is_exact:
            return made
        recorded = self._recorded[f"{prefix}{linear.name}"] = _Recorded(made)
        return recorded

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        return self._weights.matrix(prefix, linear)

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        return self._weights.tensor(name, is_exact=is_exact)

    def layer_is_complete(self) -> None:
        pass

    def take(self, config: ModelConfig, index: int) -> dict[str, Tensor]:
        """Return what layer `index` has recorded, and forget its layers."""
        prefix = layer_prefix(index)
        names = [one.name for one in layer_linears(config, index) if not one.is_exact]
        recorded = {name: self._recorded.pop(f"{prefix}{name}") for name in names}
        self._weights.layer_is_complete()
        return {f"{prefix}{name}": _mean_squares(name, recorded) for name in names}


def _mean_squares(name: str, recorded: Mapping[str, _Recorded]) -> Tensor:
    """Return a matrix's mean squares, or those of this matrix of all experts where few rows reached it."""
    own = recorded[name]
    if own.num_rows >= _LEAST_ROWS:
        return own.squares / own.num_rows
    alike = [one for other, one in recorded.items() if _kind(other) == _kind(name)]
    return torch.stack([one.squares for one in alike]).sum(0) / max(sum(one.num_rows for one in alike), 1)


def _kind(name: str) -> str:
    """Return a name that the same matrix of all experts has."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _step(config: ModelConfig, maker: LayerMaker, dtype: torch.dtype, stream: torch.dtype, device: Device) -> Step:
    """Return the step that reads the ids, in its sequences."""
    count, blocks = NUM_IDS // SEQUENCE, SEQUENCE // _BLOCK_SIZE
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    lengths = [SEQUENCE] * count
    metadata, positions = AttentionMetadata.build(lengths, lengths, tables, _BLOCK_SIZE, device.torch_device)
    kv = KVShape.of(config, dtype, _BLOCK_SIZE).pool(count * blocks, device.torch_device)
    kv.states = new_states(state_layout(config.delta, dtype), count, device.torch_device)
    if kv.states is not None:
        metadata = replace(metadata, state_slots=tuple(range(count)))
    turns = [rotary(positions) for rotary in maker.rotaries(device)]
    return Step(turns, metadata, kv, attention_of(config, dtype, device), stream)
