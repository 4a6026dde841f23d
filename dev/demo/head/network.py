"""An EAGLE-3 head over the demo model: its weights under the published names, and the products that the fit needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen2Config

TAPS = (1, 2, 3)
"""Hidden states that the head reads, numbered as transformers': the inputs of the model's last three layers."""
INNER = 1024
"""Width of the head's MLP."""
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class Head(nn.Module):
    """The head's weights under the published names (config.json: LlamaForCausalLMEagle3)."""

    def __init__(self, config: Qwen2Config, draft_vocab: int) -> None:
        """Make weights of the right shapes."""
        super().__init__()
        width = config.hidden_size
        # Heads enough to hold both norms of a row.
        self.head_dim = width // config.num_attention_heads
        self.num_heads = self.num_kv_heads = 2 * config.num_attention_heads
        self.eps, self.theta = config.rms_norm_eps, float(config.rope_parameters["rope_theta"])
        values = self.num_heads * self.head_dim

        def product(outputs: int, inputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        attention = {f"{name}_proj": product(values, 2 * width) for name in "qkv"} | {"o_proj": product(width, values)}
        mlp = {"gate_proj": product(INNER, width), "up_proj": product(INNER, width), "down_proj": product(width, INNER)}
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(attention),
                "mlp": nn.ModuleDict(mlp),
                **{name: nn.RMSNorm(width, eps=self.eps) for name in _NORMS},
            }
        )
        self.fc = product(width, len(TAPS) * width)
        self.norm = nn.RMSNorm(width, eps=self.eps)
        self.lm_head = product(draft_vocab, width)

    def scores(self, hidden_NI: Tensor) -> Tensor:
        """Return (N, draft vocabulary)."""
        scores: Tensor = self.lm_head(self.norm(hidden_NI))
        return scores


def frequent_ids(ids_N: Tensor, count: int, vocab_size: int) -> Tensor:
    """Return the ids that come most often, ascending; of equal ones the lower."""
    counts = torch.bincount(ids_N, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values
