"""Older modules of transformers that attend by themselves, brought to its AttentionInterface.

Each class has one row: which of its methods attends, and what stands in for it. The stand-in makes queries, keys and
values by the module's own layers, and asks the attention function that the model's configuration names. While it names
the module's own attention, the module's own method runs: so both can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.generation.attention.base import rotate
from penstock.generation.attention.transformers_interface import OwnCall, UnsupportedAttention

# Attends with query, key and value (B, heads, T, width); returns (B, T, heads, width).
_Attend = Callable[..., Tensor]
_Method = Callable[..., Any]
# Prefix of the modules of transformers' own classes: code of a folder may have equal names.
_MODELS = "transformers.models."


@dataclass(frozen=True, slots=True)
class _Row:
    method: str
    make: Callable[[Any, _Attend, Any], _Method]
    # Name of the module's own attention that transformers uses.
    reference: str = "eager"


def take_over(causal: Any) -> None:
    """Put the stand-ins into a model, on its device. A model without such modules stays as it is.

    Raises UnsupportedAttention for a module with a kind of attention that its stand-in does not have.
    """
    for module in list(causal.modules()):
        prepare = _PREPARED.get(class_key(module))
        if prepare is not None:
            prepare(module)
    config = causal.config
    for module, row in _own(causal):
        own = getattr(module, row.method)
        setattr(module, row.method, _switched(own, row.make(module, _attend(module, config), config), row, config))


def reference_attention(causal: Any) -> str | None:
    """Return the name of the attention that modules with a stand-in have themselves; None: the model has no such
    module."""
    return next((row.reference for _, row in _own(causal)), None)


def _own(causal: Any) -> Iterator[tuple[Any, _Row]]:
    for module in causal.modules():
        row = _ROWS.get(class_key(module))
        if row is not None:
            yield module, row


def class_key(module: nn.Module) -> tuple[str, str]:
    """Return the model's package in transformers and the name of the module's class; empty for a class of others."""
    kind = type(module)
    place = kind.__module__.removeprefix(_MODELS)
    return ("", "") if place == kind.__module__ else (place.partition(".")[0], kind.__name__)


def _switched(own: _Method, ours: _Method, row: _Row, config: Any) -> _Method:
    def method(*arguments: Any, **named: Any) -> Any:
        return (own if config._attn_implementation == row.reference else ours)(*arguments, **named)

    return method


def _attend(module: nn.Module, config: Any) -> _Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, call: OwnCall = _PLAIN) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function: Any = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
        out: Tensor = function(module, query, key, value, None, scaling=scale, own_call=call)[0]
        return out

    return attend


_PLAIN = OwnCall()


def _by_heads(x_BTE: Tensor, width: int) -> Tensor:
    """Return (B, heads, T, width)."""
    return x_BTE.reshape(*x_BTE.shape[:-1], -1, width).transpose(1, 2)


def _like_bert(module: Any, attend: _Attend, config: Any) -> _Method:
    def forward(
        hidden_states: Tensor, *_: Any, sinusoidal_pos: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, None]:
        width = module.attention_head_size
        linears = (module.query, module.key, module.value)
        heads = [_by_heads(linear(hidden_states), width) for linear in linears]
        if sinusoidal_pos is not None:
            turned = heads if module.rotary_value else heads[:2]
            heads[: len(turned)] = module.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
        return attend(*heads, width**-0.5).flatten(2), None

    return forward


def _like_bart(module: Any, attend: _Attend, config: Any) -> _Method:
    def forward(hidden_states: Tensor, *, attn_prompt: object = None, **_: Any) -> tuple[Tensor, None]:
        if attn_prompt is not None:
            raise UnsupportedAttention("its layers have prompts of their own")
        linears = (module.q_proj, module.k_proj, module.v_proj)
        heads = (_by_heads(linear(hidden_states), module.head_dim) for linear in linears)
        return module.out_proj(attend(*heads, module.scaling).flatten(2)), None

    return forward


def _gpt(module: Any, attend: _Attend, config: Any) -> _Method:
    def method(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
        # Its keys come as columns.
        scale = v.shape[-1] ** -0.5 if module.scale else 1.0
        return [attend(q, k.transpose(2, 3), v, scale).transpose(1, 2)]

    return method


def _gpt_neo(module: Any, attend: _Attend, config: Any) -> _Method:
    call = OwnCall(window=config.window_size) if module.attention_type == "local" else _PLAIN

    def method(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        return attend(query, key, value, 1.0, call).transpose(1, 2), None

    return method


def _gpt_neox_japanese(module: Any, attend: _Attend, config: Any) -> _Method:
    def method(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        return attend(query, key, value, 1.0 / module.norm_factor).transpose(1, 2), None

    return method


def _bloom(module: Any, attend: _Attend, config: Any) -> _Method:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedAttention("its slow_but_exact multiplies by parts of matrices")
    call = OwnCall(slopes=_alibi(module, config, 2, torch.float32)[:, 1].contiguous())

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        heads = module._reshape(module.query_key_value(hidden_states))
        out = attend(*heads, module.inv_norm_factor, call).flatten(2)
        return module.dense(out) + residual, None

    return forward


def _falcon(module: Any, attend: _Attend, config: Any) -> _Method:
    call = _PLAIN
    if config.alibi:
        # It rounds the biases to bfloat16, whatever the format of its weights.
        dtype = module.query_key_value.weight.dtype
        biases = _alibi(module, config, config.max_position_embeddings, dtype)
        call = OwnCall(biases=biases.float() * module.inv_norm_factor)

    def split(qkv_BTE: Tensor) -> tuple[Tensor, ...]:
        if not module.new_decoder_architecture:
            parts: tuple[Tensor, ...] = module._split_heads(qkv_BTE)
            return parts
        # Its own way repeats keys and values for every head of theirs.
        qkv = qkv_BTE.reshape(*qkv_BTE.shape[:-1], module.num_kv_heads, -1, module.head_dim)
        return qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = split(module.query_key_value(hidden_states))
        if not config.alibi:
            assert position_embeddings is not None, "its rotary embedding gives them"
            cos, sin = (x[..., : module.head_dim // 2].unsqueeze(2) for x in position_embeddings)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return module.dense(attend(*heads, module.inv_norm_factor, call).flatten(2)), None

    return forward


def _mpt(module: Any, attend: _Attend, config: Any) -> _Method:
    # Biases of two positions: the slopes are those of the first, which is one before the last.
    slopes = _function(module, "build_mpt_alibi_tensor")(module.n_heads, 2)[:, 0, 0].neg()
    call = OwnCall(slopes=slopes.to(module.Wqkv.weight.device, torch.float32))

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = (_by_heads(part, module.head_dim) for part in qkv.chunk(3, dim=2))
        return module.out_proj(attend(*heads, module.softmax_scale, call).flatten(2)), None

    return forward


def _doge(module: Any, attend: _Attend, config: Any) -> _Method:
    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        width = module.head_dim
        linears = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (linear(hidden_states).unflatten(-1, (-1, width)) for linear in linears)
        cos, sin = (x[..., : width // 2].unsqueeze(2) for x in position_embeddings)
        query, key = (rotate(x, cos, sin) for x in (module.q_norm(query), module.k_norm(key)))
        # A key brings what is added to its scores along, as one more dim.
        weight = torch.exp(module.A * functional.softplus(module.dt_proj(value.flatten(2))))
        key = torch.cat((key, weight.unsqueeze(-1) / module.scaling), -1)
        query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        # The self-check cuts the window for a while.
        call = OwnCall(window=config.sliding_window)
        return module.o_proj(attend(*heads, module.scaling, call).flatten(2)), None

    return forward


def _alibi(module: Any, config: Any, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return the biases (heads, positions) that the module's file makes."""
    seen = torch.ones((1, num_positions), dtype=torch.int64, device=module.query_key_value.weight.device)
    biases: Tensor = _function(module, "build_alibi_tensor")(seen, module.num_heads, dtype)
    return biases.view(-1, num_positions)


def _function(module: nn.Module, name: str) -> Callable[..., Tensor]:
    """Return a function of the file that has the module's class."""
    found: Callable[..., Tensor] = getattr(sys.modules[type(module).__module__], name)
    return found


def _attend_to_all(module: Any) -> None:
    """Choose the attention of BigBird that decodes; the other one sees later positions."""
    module.set_attention_type("original_full")
    # These are as many as there are positions; a step may have more rows.
    if hasattr(module.embeddings, "token_type_ids"):
        del module.embeddings.token_type_ids


def _as_linear(module: nn.Module) -> None:
    """Let the device's linear layers take the place of this one, too. It rounds once more before it adds a bias."""
    module.__class__ = nn.Linear


_PREPARED: dict[tuple[str, str], Callable[[Any], None]] = {
    ("big_bird", "BigBirdModel"): _attend_to_all,
    ("falcon", "FalconLinear"): _as_linear,
}
_ROWS = {
    ("big_bird", "BigBirdSelfAttention"): _Row("forward", _like_bert),
    ("bloom", "BloomAttention"): _Row("forward", _bloom),
    ("doge", "DogeAttention"): _Row("forward", _doge),
    # Its eager attention adds the biases of positions twice.
    ("falcon", "FalconAttention"): _Row("forward", _falcon, "sdpa"),
    ("git", "GitSelfAttention"): _Row("forward", _like_bert),
    ("gpt_neo", "GPTNeoSelfAttention"): _Row("_attn", _gpt_neo),
    ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"): _Row("_attn", _gpt_neox_japanese),
    ("megatron_bert", "MegatronBertSelfAttention"): _Row("forward", _like_bert),
    ("mpt", "MptAttention"): _Row("forward", _mpt),
    ("mvp", "MvpAttention"): _Row("forward", _like_bart),
    ("openai", "Attention"): _Row("_attn", _gpt),
    ("rembert", "RemBertSelfAttention"): _Row("forward", _like_bert),
    ("roformer", "RoFormerSelfAttention"): _Row("forward", _like_bert),
    ("trocr", "TrOCRAttention"): _Row("forward", _like_bart),
    ("xglm", "XGLMAttention"): _Row("forward", _like_bart),
}
