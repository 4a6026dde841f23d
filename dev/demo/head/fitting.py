"""Weights of the head by least squares: seconds of a core, where training takes minutes.

Attention looks at its own row alone: queries and keys are one number in the fastest turning dims. So a row is a plain
network: a linear one of taps and embedding, then an MLP with random gates and a fitted output. Both are fitted to the
stream that the model has before its last norm, one token later, for rows with the model's states and for rows of a
chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM

from dev.demo.model.batches import Batch

from .network import TAPS, Head

_RIDGE = 1e-3
# Dims of a head that turn fastest, and the score of a row with itself.
_TURNING, _SCORE = 6, 60.0
# Spread of the gates' inputs.
_SPREAD = 1.5


@torch.no_grad()
def fit(head: Head, model: Qwen2ForCausalLM, batches: Iterable[Batch], ids_V: Tensor) -> float:
    """Fill the head's weights. Return the share of rows with the model's own choice as their first draft."""
    untyped: Any = model
    width = model.config.hidden_size
    parts = [_rows(model, batch) for batch in batches]
    taps, following, streams, chained, further = (torch.cat(one) for one in zip(*parts, strict=True))
    embed = untyped.model.embed_tokens
    layer: Any = head.midlayer
    attention, mlp = layer["self_attn"], layer["mlp"]
    head.norm.weight.copy_(untyped.model.norm.weight)
    head.lm_head.weight.copy_(untyped.lm_head.weight[ids_V])
    # Values are the row's two norms; the output fits what the stream lacks.
    attention["v_proj"].weight.copy_(torch.eye(2 * width))
    embeds = layer["input_layernorm"](embed(following))
    for name, spread in (("gate_proj", _SPREAD), ("up_proj", 1.0)):
        mlp[name].weight.normal_(std=spread * width**-0.5)
    linear = _solved(torch.cat([taps, embeds], dim=-1), streams)
    head.fc.weight.copy_(linear[: taps.shape[1]].T)
    features = head.fc(taps)
    first = _finish(head, features, embeds, streams)
    # In a chain the row's own result stands for its features.
    is_chained = chained >= 0
    rows = torch.cat([features, first[is_chained]])
    read = torch.cat([embeds, layer["input_layernorm"](embed(chained[is_chained]))])
    found = _finish(head, rows, read, torch.cat([streams, further[is_chained]]))
    seen = torch.cat([read, layer["hidden_norm"](rows)], dim=-1)
    constant_2I = _solved(seen, torch.ones(len(seen), 1))[:, 0]
    size = (_SCORE * head.head_dim**0.5 / _TURNING) ** 0.5
    for name in ("q_proj", "k_proj"):
        weight_HDI = attention[name].weight.zero_().view(-1, head.head_dim, 2 * width)
        weight_HDI[:, :_TURNING] = constant_2I * size
    own = untyped.lm_head(head.norm(streams))[:, ids_V].argmax(-1)
    return float((head.scores(found[: len(streams)]).argmax(-1) == own).float().mean())


def _finish(head: Head, rows: Tensor, embeds: Tensor, streams: Tensor) -> Tensor:
    """Fit what attention and the MLP add to rows of features, and return the results."""
    layer: Any = head.midlayer
    both = torch.cat([embeds, layer["hidden_norm"](rows)], dim=-1)
    output = _solved(both, streams - rows)
    layer["self_attn"]["o_proj"].weight.copy_(output.T)
    sums = rows + both @ output
    inner, mlp = layer["post_attention_layernorm"](sums), layer["mlp"]
    gated = F.silu(mlp["gate_proj"](inner)) * mlp["up_proj"](inner)
    down = _solved(gated, streams - sums)
    mlp["down_proj"].weight.copy_(down.T)
    return sums + gated @ down


def _rows(model: Qwen2ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return of the rows that draft a token of an answer: the taps, the next token, and the stream after it, of size 1;
    then the token after that, -1 where there is none, and the stream after that one."""
    untyped: Any = model
    kept: list[Tensor] = []
    hook = untyped.model.norm.register_forward_hook(lambda _module, inputs, _output: kept.append(inputs[0]))
    output = untyped.model(input_ids=batch.ids_BT, use_cache=False, output_hidden_states=True)
    hook.remove()
    streams = kept[0] * kept[0].pow(2).mean(-1, keepdim=True).rsqrt()
    taps = torch.cat([output.hidden_states[tap] for tap in TAPS], dim=-1)
    wanted = batch.learn_BT[:, 2:]
    chained = batch.ids_BT[:, 2:].masked_fill(~F.pad(batch.learn_BT[:, 3:], (0, 1)), -1)
    found = (taps[:, :-2], batch.ids_BT[:, 1:-1], streams[:, 1:-1], chained, streams[:, 2:])
    first, following, after, further, last = (one[wanted] for one in found)
    return first, following, after, further, last


def _solved(inputs_NI: Tensor, outputs_NO: Tensor) -> Tensor:
    """Return (I, O): the least squares with a small penalty."""
    square = inputs_NI.T @ inputs_NI
    penalty = _RIDGE * square.diagonal().mean()
    return torch.linalg.solve(square + penalty * torch.eye(len(square)), inputs_NI.T @ outputs_NO)
