"""EAGLE-3 folders with made weights in the published layouts, and what such a head computes, written out in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from factories.models.checkpoints import VOCAB_SIZE
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 64, 4, 2, 12
DRAFT_VOCAB = 200
EPS, THETA = 1e-5, 10_000.0


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """Return config.json as SGLang's trainer writes it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }


def eagle3_tensors(seed: int = 0, prefix: str = "midlayer.") -> dict[str, Tensor]:
    """Return all tensors of the layout: ids of every third token or so are scored."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    def norm() -> Tensor:
        return 1.0 + weight(HIDDEN)

    served = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values
    is_scored = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    is_scored[served] = True
    layer = {
        "input_layernorm.weight": norm(),
        "hidden_norm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
        "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": weight(INNER, HIDDEN),
        "mlp.up_proj.weight": weight(INNER, HIDDEN),
        "mlp.down_proj.weight": weight(HIDDEN, INNER),
    }
    return {
        "d2t": served - torch.arange(DRAFT_VOCAB),
        "t2d": is_scored,
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": weight(DRAFT_VOCAB, HIDDEN) * 4,
        **{f"{prefix}{name}": tensor for name, tensor in layer.items()},
    }


def eagle3_folder(folder: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """Write a folder as it lies on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(eagle3_config(**config)), encoding="utf-8")
    save_file(dict(eagle3_tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


def random_eagle3(random: Random, served: ModelConfig, folder: Path) -> Path:
    """Write a head of random widths and parts for a served model."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    has_table, vocab, wide = random.random() < 0.3, served.vocab_size, served.hidden_size
    hidden = random.choice([16, 24, 40]) if has_table else wide
    kv_heads, times, head_dim = random.choice([1, 2]), random.choice([1, 2]), random.choice([8, 12])
    heads, inner, scale = kv_heads * times, random.choice([24, 40]), random.choice([0.05, 0.2])
    scored = vocab if random.random() < 0.3 else random.randint(2, vocab)
    ids = torch.randperm(vocab, generator=generator)[:scored].sort().values

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    prefix = random.choice(["midlayer.", "layers.0."])
    layer = {
        "self_attn.q_proj": weight(heads * head_dim, 2 * hidden),
        "self_attn.k_proj": weight(kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": weight(kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj": weight(hidden, heads * head_dim),
        "mlp.gate_proj": weight(inner, hidden),
        "mlp.up_proj": weight(inner, hidden),
        "mlp.down_proj": weight(hidden, inner),
        **{name: 1.0 + weight(hidden) for name in norms},
    }
    tensors = {
        "fc.weight": weight(hidden, 3 * wide),
        "norm.weight": 1.0 + weight(hidden),
        "lm_head.weight": weight(scored, hidden) * 4,
        **{f"{prefix}{name}.weight": tensor for name, tensor in layer.items()},
    }
    if scored < vocab:
        tensors["d2t"] = ids - torch.arange(scored)
    if has_table:
        tensors["embed_tokens.weight"] = weight(vocab, hidden)
    return eagle3_folder(
        folder,
        tensors,
        hidden_size=hidden,
        target_hidden_size=wide,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=scored,
        norm_before_residual=random.random() < 0.5,
        eagle_aux_hidden_state_layer_ids=[random.randint(0, served.num_layers) for _ in range(3)],
    )


class ReferenceHead:
    """An EAGLE-3 head as its paper and vLLM 0.11 (llama_eagle3.py) have it: whole sequences, no cache."""

    def __init__(
        self, tensors: Mapping[str, Tensor], *, prefix: str = "midlayer.", norm_before_residual: bool = False
    ) -> None:
        self.tensors, self.prefix, self.norm_before_residual = tensors, prefix, norm_before_residual

    def features(self, low_TI: Tensor, middle_TI: Tensor, high_TI: Tensor) -> Tensor:
        return torch.cat([low_TI, middle_TI, high_TI], dim=-1) @ self.tensors["fc.weight"].T

    def forward(self, embeds_TI: Tensor, features_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states (T, hidden) and the scores of the served model's vocabulary (T, V), -inf where the
        head has none."""
        normed_TI = self._norm("hidden_norm", features_TI)
        residual_TI = normed_TI if self.norm_before_residual else features_TI
        both = torch.cat([self._norm("input_layernorm", embeds_TI), normed_TI], dim=-1)
        query, key, value = (both @ self._layer(f"self_attn.{name}_proj").T for name in "qkv")
        turned = [_rotated(x.view(len(both), -1, HEAD_DIM).transpose(0, 1)) for x in (query, key)]
        values = value.view(len(both), -1, HEAD_DIM).transpose(0, 1)
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (turned[1], values))
        attended = F.scaled_dot_product_attention(turned[0], keys, values, is_causal=True)
        hidden_TI = residual_TI + attended.transpose(0, 1).flatten(1) @ self._layer("self_attn.o_proj").T
        inner = self._norm("post_attention_layernorm", hidden_TI)
        gate, up = (inner @ self._layer(f"mlp.{name}_proj").T for name in ("gate", "up"))
        hidden_TI = hidden_TI + (F.silu(gate) * up) @ self._layer("mlp.down_proj").T
        normed = F.rms_norm(hidden_TI, (HIDDEN,), self.tensors["norm.weight"], EPS)
        scores = normed @ self.tensors["lm_head.weight"].T
        if "d2t" not in self.tensors:
            return hidden_TI, scores
        served = torch.arange(len(scores.T)) + self.tensors["d2t"]
        whole = scores.new_full((len(scores), VOCAB_SIZE), -torch.inf)
        whole[:, served] = scores
        return hidden_TI, whole

    def _layer(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def _norm(self, name: str, x_TI: Tensor) -> Tensor:
        return F.rms_norm(x_TI, (HIDDEN,), self._layer(name), EPS)


def _rotated(x_HTD: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    frequencies = THETA ** -(torch.arange(half) * 2 / HEAD_DIM)
    angles = torch.arange(x_HTD.shape[1])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x_HTD[..., :half], x_HTD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
