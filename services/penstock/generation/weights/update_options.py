"""Options of weights that a trainer writes. Light: the configuration imports this."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option

TRAINING = "Training"


@dataclass(frozen=True, kw_only=True)
class WeightUpdateOptions:
    """Options of WriteWeights. Each is declared here alone, as `EngineOptions`."""

    write_weights: bool = option(
        False,
        "Allow WriteWeights: callers whom --model-access lets in may write new weights into the running model.",
        group=TRAINING,
    )
    max_write_weights_memory: str = option(
        "auto",
        "Most memory for the tensors of one WriteWeights; auto: what is free, less the parts that are made of them.",
        group=TRAINING,
        metavar="SIZE|auto",
    )
