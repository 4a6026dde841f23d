"""A mixture of experts in place of an MLP: a router gives each row a few of many MLPs, and a weight for each.

Rows are sorted by expert, so that the weights of an expert are read once a step for all of its rows. A row sums up its
experts in the order of their numbers, with any rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.generation.layers.expert_choice import Choice, choice_of
from penstock.generation.layers.linear.native import NativeLinear

if TYPE_CHECKING:
    from penstock.generation.core.model_config import Experts
    from penstock.generation.layers.linear.base import Linear

# A multiple of the floats that torch takes at a time: two of AVX-512's vectors.
_WHOLE_VECTORS = 32


class HasStream(Protocol):
    """Facts of a step that experts need."""

    @property
    def stream(self) -> torch.dtype:
        """Dtype of the residual stream."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP for every row in addition to its experts, times the sigmoid of one more output, if there is one."""

    gated: Linear
    down: Linear
    gate: Linear | None = None

    def add_to(self, out_TI: Tensor, x_TI: Tensor) -> None:
        """Add its part to `out_TI` in float32."""
        if self.gate is None:
            out_TI += self.down.as_float(self.gated(x_TI))
            return
        scores_T1 = self.gate.as_float(x_TI)
        # On a CPU torch computes the numbers after the last whole vector in another way: their last bits may differ.
        # Padding leaves no such numbers, so no row depends on the number of rows beside it.
        shares_T1 = torch.sigmoid(pad(scores_T1, (0, 0, 0, -len(scores_T1) % _WHOLE_VECTORS)))[: len(scores_T1)]
        out_TI += shares_T1 * self.down.as_float(self.gated(x_TI))


class MixtureOfExperts:
    """A router, experts and, in some models, an MLP that all rows share."""

    def __init__(
        self,
        config: Experts,
        router: Linear,
        experts: Sequence[tuple[Linear, Linear]],
        shared: SharedExpert | None = None,
        choice: Choice | None = None,
    ) -> None:
        """Take the router (hidden to experts), gated and down of every expert, and the shared MLP. `choice`: the rule
        of the experts; None: that of `config`."""
        self.route = choice or choice_of(config)
        self._reads_float32 = config.routing.in_float32
        self.router = router
        self.experts = tuple(experts)
        self.shared = shared
        self._multiply = expert_products(self.experts)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Products that --quantization changes."""
        shared = () if self.shared is None else (self.shared.gated, self.shared.down)
        return (*(linear for expert in self.experts for linear in expert), *shared)

    @property
    def are_grouped(self) -> bool:
        """True where one call of the C++ kernels has the products of all experts."""
        return not isinstance(self._multiply, OneByOne)

    def __call__(self, x_TI: Tensor, step: HasStream) -> Tensor:
        """Map (T, hidden) to (T, hidden), in the dtype of the stream. No adapter changes an expert."""
        rows_TI = x_TI.float() if self._reads_float32 else x_TI
        experts_TE, shares_TE = self.route(self.router.as_float(rows_TI))
        out_TI = self._multiply(x_TI, experts_TE, shares_TE)
        if self.shared is not None:
            self.shared.add_to(out_TI, x_TI)
        return out_TI.to(step.stream)


def expert_products(
    experts: Sequence[tuple[Callable[[Tensor], Tensor], Linear]],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of rows (T, hidden), of the numbers of each row's experts, and of its shares in them, both
    (T, experts of a row), in int64 and float32. It gives each row's sum of its experts times its shares, in float32.

    An expert is its products up to the gate, and its down. They are one call of the C++ kernels where all are native,
    gated and of one format.
    """
    return _grouped(experts) or OneByOne(experts)


class OneByOne:
    """The function of `expert_products` as one product an expert that has rows."""

    def __init__(self, experts: Sequence[tuple[Callable[[Tensor], Tensor], Linear]]) -> None:
        """Take the experts, of any kind."""
        self._experts = tuple(experts)

    def __call__(self, x_TI: Tensor, experts_TE: Tensor, shares_TE: Tensor) -> Tensor:
        """A row sums up its experts in the order of their numbers."""
        flat, per_row = experts_TE.flatten(), experts_TE.shape[1]
        order = flat.argsort(stable=True)
        rows, shares = order // per_row, shares_TE.flatten()[order].unsqueeze(1)
        out_TI = x_TI.new_zeros(x_TI.shape, dtype=torch.float32)
        first = 0
        for (gated, down), count in zip(
            self._experts, flat.bincount(minlength=len(self._experts)).tolist(), strict=True
        ):
            if count:
                own = rows[first : first + count]
                product = down.as_float(gated(x_TI[own]))
                out_TI.index_add_(0, own, product.mul_(shares[first : first + count]))
                first += count
        return out_TI


def _grouped(
    experts: Sequence[tuple[Callable[[Tensor], Tensor], Linear]],
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the products of all experts as one call of the C++ kernels (csrc/decoder/ops_experts.cpp); None if they
    are not native, not gated there, or of several formats."""
    tensors, formats = [], set()
    for gated, down in experts:
        if not isinstance(gated, NativeLinear) or not gated.gate or not isinstance(down, NativeLinear):
            return None
        both = {"gated": gated, "down": down}
        tensors.append(
            {f"{name}.{part}": own for name, one in both.items() for part, own in one.packed.parts().items()}
        )
        # Experts of a quantised checkpoint may keep their format.
        formats |= {gated.format, down.format}
    gated, _ = experts[0]
    assert isinstance(gated, NativeLinear)
    if len(formats) > 1:
        return None
    sizes = {
        "format": int(gated.format),
        "gate": gated.gate,
        "hidden": gated.in_features,
        "inner": gated.out_features,
    }
    handle: Any = torch.classes.penstock.Experts(sizes, tensors)
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = handle.forward
    return multiply
