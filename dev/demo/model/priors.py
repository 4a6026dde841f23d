"""Starting weights that already look back: heads for the previous tokens, and heads that continue what they have seen.

A fresh transformer needs millions of tokens before such heads form, and copying, recalling and spelling all wait for
them (Olsson et al., In-context Learning and Induction Heads, 2022; the idea of structured starting weights is that of
Trockman and Kolter, Mimetic Initialization of Self-Attention Layers, 2023). Training goes on from here as usual.
"""

from typing import Any

import torch
from transformers import Qwen2ForCausalLM

_SHARPNESS = 6.0
"""Length of each rotated bias pair: enough for a look at one distance to outweigh its neighbours."""
_PAIRS = 8
"""Fastest-turning rotary pairs that carry the distance."""
_MATCH = 1.4
"""Scale of the projections that compare tokens; rows are orthonormal."""
_WRITE = 0.03
"""Scale of what a head writes: about the size of an embedding, which the residual stream starts from."""


def _orthonormal(rows: int, columns: int) -> torch.Tensor:
    square: torch.Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return square.T.contiguous()


def _look_back(attention: Any, head: int, group: int, distance: int, head_dim: int, theta: float) -> None:
    """Biases that make a query head attend to the token `distance` places back, whatever the tokens are."""
    half = head_dim // 2
    angles = distance * theta ** (-torch.arange(_PAIRS) / half)
    query, key = attention.q_proj.bias[head * head_dim :], attention.k_proj.bias[group * head_dim :]
    query[:_PAIRS], query[half : half + _PAIRS] = _SHARPNESS * angles.cos(), -_SHARPNESS * angles.sin()
    key[:_PAIRS] = _SHARPNESS


@torch.no_grad()
def add_priors(model: Qwen2ForCausalLM) -> None:
    """Changes a fresh model in place: looking back in the first layer, continuing in the second and third."""
    config, layers = model.config, [layer.self_attn for layer in model.model.layers]
    width, heads, groups = config.hidden_size, int(config.num_attention_heads), int(config.num_key_value_heads or 1)
    dim, share = width // heads, heads // groups
    first: Any = layers[0]
    theta = float(first.config.rope_parameters["rope_theta"])
    read = _orthonormal(dim, width)
    writes = [_orthonormal(dim, width) for _ in range(share)]
    first.v_proj.weight[:dim] = read
    for head in range(share):
        _look_back(first, head, 0, head + 1, dim, theta)
        first.o_proj.weight[:, head * dim : (head + 1) * dim] = _WRITE * writes[head].T
    following: list[Any] = list(layers[1:3])
    for attention in following:
        # The first group looks for a place after an earlier copy of the present token, and copies the token there.
        attention.k_proj.weight[:dim] = _MATCH * writes[0]
        for group in range(groups):
            copied = _orthonormal(dim, width)
            attention.v_proj.weight[group * dim : (group + 1) * dim] = copied
            for head in range(group * share, (group + 1) * share):
                span = slice(head * dim, (head + 1) * dim)
                attention.o_proj.weight[:, span] = _WRITE * copied.T
                if group == 0:
                    attention.q_proj.weight[span] = _MATCH * read
