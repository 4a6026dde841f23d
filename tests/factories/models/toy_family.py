"""A model family that nobody else has, made by the checklist: a configuration, transformers' modules, and one `Family`.

Qwen 3 with biases of queries, keys and values always, and of the output never, which no family in the tree has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from factories.models import checkpoints
from penstock.generation.models import registry
from penstock.generation.models.family import Family, always
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


class ToyConfig(Qwen3Config):
    """Configuration of the toy family."""

    model_type = "toy"


class ToyForCausalLM(Qwen3ForCausalLM):
    """The reference: transformers' modules of Qwen 3, other biases."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        config.attention_bias = True
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj = torch.nn.Linear(layer.self_attn.o_proj.in_features, config.hidden_size, bias=False)


# Step 2 of docs/learn/add-a-family.md.
TOY = Family(
    model_type="toy",
    architecture="ToyForCausalLM",
    qkv_bias=always,
    qk_norm=True,
    defaults={"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
)


@contextmanager
def toy_family() -> Iterator[None]:
    """Register it: step 3, and step 6 for transformers and for the tests' checkpoints."""
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    with (
        mock.patch.dict(registry.FAMILIES, {"toy": TOY}),
        mock.patch.dict(checkpoints._CONFIGS, {"toy": ToyConfig}),
    ):
        yield


def toy_checkpoint(folder: Path, **config: Any) -> Path:
    """Write a random one, as `tiny_checkpoint` does."""
    return checkpoints.tiny_checkpoint(folder, "toy", head_dim=16, **config)
