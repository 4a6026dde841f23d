"""Logits processors and stopping criteria of a server's owner, good and bad ones, with transformers' signature."""

from __future__ import annotations

from typing import Any

import torch

# Flags of a service that loads them all.
FLAGS: dict[str, tuple[str, ...]] = {
    "logits_processor": tuple(
        f"{name}=factories.engine.plugins:{kind}"
        for name, kind in {
            "favour": "Favour",
            "one-token": "OneToken",
            "raising": "Raising",
            "wrong-shape": "WrongShape",
            "not-a-number": "NotANumber",
            "huge": "Huge",
            "broken": "Broken",
            "exiting": "Exiting",
        }.items()
    ),
    "stopping_criteria": (
        "multiple=factories.engine.plugins:Multiple",
        "raising=factories.engine.plugins:Raising",
        "exiting=factories.engine.plugins:Exiting",
    ),
}


class Favour:
    """Adds `bias` to a part of the vocabulary that depends on all ids so far."""

    def __init__(self, bias: float = 2.0, parts: int = 3) -> None:
        self.bias, self.parts = bias, parts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = torch.arange(scores.shape[1])[None] % self.parts == input_ids.sum(1, keepdim=True) % self.parts
        return scores + self.bias * favoured


class OneToken:
    """Removes all but one token, in place."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, : self.token_id] = scores[:, self.token_id + 1 :] = -torch.inf
        return scores


class Multiple:
    """Holds where the last id is a multiple of `of`."""

    def __init__(self, of: int) -> None:
        if of < 1:
            raise ValueError("of must be at least 1")
        self.of = of

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.of == 0


class Raising:
    """Raises once the ids are `after` long."""

    def __init__(self, after: int = 0) -> None:
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.after:
            raise LookupError(f"secret {input_ids.tolist()}")
        return False if scores is None else scores


class WrongShape:
    """Returns the scores without their last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :-1]


class NotANumber:
    """Returns a NaN."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, 3] = torch.nan
        return scores


class Huge:
    """Returns the highest of all numbers."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 7] = torch.finfo(scores.dtype).max
        return scores


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no such device")


class Exiting:
    """Ends the process, as it thinks."""

    def __init__(self, *, at_once: bool = False) -> None:
        if at_once:
            raise SystemExit(3)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        raise SystemExit(3)
