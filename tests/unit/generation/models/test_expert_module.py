"""Experts of transformers' modules on the device's own products give the numbers of transformers' functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from factories.models.model_types import tiny_config
from factories.models.run_kernels import cpu_device
from penstock.generation.models.expert_module import ExpertModule, has_known_experts
from torch import nn
from transformers import AutoModelForCausalLM

# Gated by silu; transposed; interleaved with biases and a gate of its own; without a gate; gated by gelu.
KINDS = ("mixtral", "aria_text", "gpt_oss", "nemotron_h", "gemma4_text")
CHANGES: dict[str, dict[str, Any]] = {"gemma4_text": {"enable_moe_block": True, "num_experts": 4}}


def experts_of(kind: str) -> nn.Module:
    """Make a model's first module of experts, with random weights."""
    torch.manual_seed(3)
    config = tiny_config(kind, **CHANGES.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    module = next(module for module in model.modules() if hasattr(module, "is_transposed"))
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.2)
    return module


def routed(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    x = torch.randn(9, weight.shape[1 if module.is_transposed else 2])
    scores, chosen = torch.randn(9, len(weight)).topk(2)
    return x, chosen, scores.softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_transformers(kind: str) -> None:
    theirs, device = experts_of(kind), cpu_device()
    assert has_known_experts(theirs, torch.float32)
    assert not has_known_experts(theirs, torch.bfloat16)
    arguments = routed(theirs)
    wanted = theirs(*arguments)
    dense = sum(parameter.nbytes for parameter in theirs.parameters())
    sizes = []
    for quantization, tolerance in (("none", 1e-5), ("int8", 0.03)):
        method = device.linear_method(torch.float32, quantization)
        ours = ExpertModule(copy.deepcopy(theirs), method, device.layer_kernels(torch.float32))
        error = (ours(*arguments) - wanted).norm() / wanted.norm()
        assert error < tolerance
        sizes.append(ours.num_bytes)
    assert sizes[0] == dense
    assert sizes[1] < dense / 2


def test_its_weights_are_kept_once() -> None:
    theirs, device = experts_of("nemotron_h"), cpu_device()
    ours = ExpertModule(theirs, device.linear_method(torch.float32, "none"), device.layer_kernels(torch.float32))
    assert not list(theirs.parameters())
    assert not list(ours.parameters())


def test_other_modules_are_left_alone() -> None:
    assert not has_known_experts(nn.Linear(2, 2), torch.float32)
    theirs = experts_of("mixtral")
    theirs.register_parameter("further", nn.Parameter(torch.zeros(2)))
    assert not has_known_experts(theirs, torch.float32)
