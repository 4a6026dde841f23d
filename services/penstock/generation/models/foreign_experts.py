"""Experts of transformers' modules that are written another way, brought to the one that the others have.

DBRX keeps gates, ups and downs of all experts as three matrices. Some experts of LongCat return their row. Llama 4
scales an expert's rows, not its results, and computes every expert for every row. JetMoE routes inside of its MLP, and
gives each row the queries of a few experts and mixes their outputs after attention; it sorts rows on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.generation.models.own_attention import class_key

if TYPE_CHECKING:
    from penstock.generation.models.expert_module import ExpertModule

# Steps with more rows go through JetMoE's own attention: it computes fewer products, these are all experts'.
_MOST_ROWS = 64


class Concatenated(nn.Module):
    """Experts with the facts and weights of transformers' usual form: (experts, 2 * inner, hidden), gates first, and
    (experts, hidden, inner)."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = False

    def __init__(self, gate_up_EOI: Tensor, down_EOI: Tensor, act: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_EOI, requires_grad=False)
        self.down_proj = nn.Parameter(down_EOI, requires_grad=False)
        self.act_fn = act

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        product: Tensor = self.act_fn(gate) * up
        return product


class JetMoeExperts(nn.Module):
    """JetMoE's mixture over one call of experts."""

    def __init__(self, theirs: Any, experts: ExpertModule) -> None:
        super().__init__()
        self.router, self.bias, self._experts = theirs.router, theirs.bias, experts

    def forward(self, layer_input: Tensor) -> Tensor:
        """Return the mixture's part, in the input's shape."""
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        experts, shares = _routed(self.router, rows)
        out: Tensor = self._experts(rows, experts, shares) + self.bias
        return out.view(layer_input.shape)


class Llama4Experts(nn.Module):
    """Llama 4's mixture over one call of those experts that a row chose: for the others it has zeros."""

    def __init__(self, theirs: Any, experts: ExpertModule) -> None:
        super().__init__()
        self.router, self.shared_expert, self._experts = theirs.router, theirs.shared_expert, experts
        self._per_row: int = theirs.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture's part (T, hidden), and the router's results."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = functional.linear(rows, self.router.weight, self.router.bias)
        best, experts = logits.topk(self._per_row, dim=1)
        shares = torch.sigmoid(best.float()).to(rows.dtype)
        # A row for each of its experts.
        scaled = (rows.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)
        chosen = experts.reshape(-1, 1)
        found: Tensor = self._experts(scaled, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return self.shared_expert(rows) + found.view(-1, self._per_row, rows.shape[1]).sum(1), logits


class LongcatExperts(nn.Module):
    """LongCat's experts: those from `count` on return their row."""

    def __init__(self, theirs: Any, experts: ExpertModule) -> None:
        super().__init__()
        self._count: int = theirs.num_routed_experts
        self._experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (T, hidden): the weighted sum of each row's experts (T, experts of a row)."""
        is_own = top_k_index >= self._count
        # In place of these any expert, with nothing of its result.
        out: Tensor = self._experts(
            hidden_states, top_k_index.masked_fill(is_own, 0), top_k_weights.masked_fill(is_own, 0.0)
        )
        kept = top_k_weights.masked_fill(~is_own, 0.0).sum(1, keepdim=True)
        return out + (hidden_states * kept).to(out.dtype)


_DBRX, _LONGCAT = ("dbrx", "DbrxExperts"), ("longcat_flash", "LongcatFlashExperts")
_JETMOE, _LLAMA4 = ("jetmoe", "JetMoeMoE"), ("llama4", "Llama4TextMoe")
_IN_PLACE: dict[tuple[str, str], Callable[[Any, ExpertModule], nn.Module]] = {
    _JETMOE: JetMoeExperts,
    _LLAMA4: Llama4Experts,
    _LONGCAT: LongcatExperts,
}


def usual_form(module: Any) -> nn.Module:
    """Return the experts of a module in the usual form; the module itself where it is no such one."""
    key = class_key(module)
    if key == _DBRX:
        own = module.mlp
        w1, v1, w2 = (x.detach().view(module.num_experts, -1, module.hidden_size) for x in (own.w1, own.v1, own.w2))
        return Concatenated(torch.cat((w1, v1), 1), w2.transpose(1, 2), own.activation_fn)
    if key == _JETMOE:
        gate_up, down = module.input_linear.weight.detach(), module.output_linear.weight.detach()
        return Concatenated(gate_up, down, module.activation)
    if key == _LLAMA4:
        own = module.experts
        gate_up, down = (x.detach().transpose(1, 2) for x in (own.gate_up_proj, own.down_proj))
        return Concatenated(gate_up, down, own.act_fn)
    if key == _LONGCAT and module.gate_up_proj is not None:
        # It has places for those without weights, too.
        gate_up = module.gate_up_proj.detach()[: module.num_routed_experts]
        return Concatenated(gate_up, module.down_proj.detach(), module.act_fn)
    return module  # type: ignore[no-any-return]


def in_place_of(module: Any, experts: ExpertModule) -> nn.Module:
    """Return what stands in a module's place with `experts` made of its `usual_form`."""
    make = _IN_PLACE.get(class_key(module))
    return experts if make is None else make(module, experts)


def mix_without_sorting(causal: nn.Module) -> None:
    """Let JetMoE's attention compute all experts' queries and outputs for steps of few rows: nearly all weights are
    read there anyway, and no number of a tensor decides what is computed."""
    for module in causal.modules():
        if class_key(module) == ("jetmoe", "JetMoeMoA"):
            mixed = _MixedAttention(module)
            module.map, module.reduce = mixed.map, mixed.reduce  # type: ignore[assignment]


class _MixedAttention:
    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._map, self._reduce = theirs.map, theirs.reduce

    def map(self, layer_input: Tensor) -> tuple[Tensor, Any, Any]:
        """Return queries (B, T, experts of a row, width), nothing, and what `reduce` needs."""
        batch, length, hidden = layer_input.shape
        if batch * length > _MOST_ROWS:
            found: tuple[Tensor, Any, Any] = self._map(layer_input)
            return found
        rows, weight_EOI = layer_input.reshape(-1, hidden), self._theirs.input_linear.weight
        experts, shares = _routed(self._theirs.router, rows)
        # Its length by `len` would be a constant of a recorded pass.
        all_TEO = functional.linear(rows, weight_EOI.flatten(0, 1)).view(rows.shape[0], *weight_EOI.shape[:2])
        places = experts.unsqueeze(2).expand(-1, -1, weight_EOI.shape[1])
        return all_TEO.gather(1, places).view(batch, length, experts.shape[1], -1), None, (places, shares)

    def reduce(self, layer_input: Tensor, chosen: Any) -> Tensor:
        """Return (B, T, hidden) for the heads of a row's experts (B, T, experts of a row, width)."""
        batch, length = layer_input.shape[:2]
        if batch * length > _MOST_ROWS:
            own: Tensor = self._reduce(layer_input, chosen)
            return own
        (places, shares), weight_EOI = chosen, self._theirs.output_linear.weight
        rows = layer_input.flatten(0, 1)
        # Nothing for the other experts.
        all_TEI = rows.new_zeros(rows.shape[0], weight_EOI.shape[0], rows.shape[2])
        all_TEI = all_TEI.scatter(1, places, rows * shares.unsqueeze(2))
        out: Tensor = torch.bmm(all_TEI.transpose(0, 1), weight_EOI.transpose(1, 2)).sum(0) + self._theirs.bias
        return out.view(batch, length, -1)


def _routed(router: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their shares, as JetMoE's router chooses them."""
    logits, experts = router.layer(rows).float().topk(router.top_k, dim=1)
    return experts, torch.softmax(logits, dim=1).type_as(rows)
