"""SynthID's Bayesian detector: transformers' trained BayesianDetectorModel on the watermark's g values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from penstock_client._wrong_values import found

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import SynthIdOptions
from penstock.generation.sampling.ops.synthid_numbers import coin_flips, context_hash, g_values

_FIELDS = ("ngram_len", "keys", "context_history_size", "sampling_table_seed", "sampling_table_size")


def read_detector(detector: Any) -> Any:
    """Return transformers' model: `detector` itself, or what a folder holds. Raises ValueError naming the folder,
    InvalidArgument for anything else."""
    if not isinstance(detector, str | Path):
        if not callable(detector) or not hasattr(detector, "config"):
            raise InvalidArgument("detector", f"must be a BayesianDetectorModel or its folder, found {found(detector)}")
        return detector
    from transformers import BayesianDetectorModel

    try:
        return BayesianDetectorModel.from_pretrained(str(detector), local_files_only=True)
    except Exception as error:
        raise ValueError(f"detector: {detector} holds no BayesianDetectorModel ({type(error).__name__})") from error


def synthid_options(watermark: Any, detector: Any) -> SynthIdOptions:
    """Return the watermark to look for: the one told, or that of the detector's configuration. Raises ValueError."""
    told = watermark if watermark is not None else getattr(detector.config, "watermarking_config", None)
    fields = told if isinstance(told, Mapping) else {} if told is None else told.to_dict()
    if not fields.get("keys") or not fields.get("ngram_len"):
        raise ValueError(
            "watermarking_config: must have SynthID's keys and ngram_len: the detector's own configuration tells none"
        )
    known = {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
    return SynthIdOptions(**{**known, "keys": tuple(known["keys"])})


@torch.inference_mode()
def posterior(detector: Any, options: SynthIdOptions, token_ids: Sequence[int], end_ids: Sequence[int] = ()) -> float:
    """Return the probability that a text carries the watermark, as transformers' SynthIDTextWatermarkDetector.

    `token_ids` is the output alone. Tokens from the first of `end_ids` on, and after a context that came before, do not
    count. Raises InvalidArgument for a text without a whole context.
    """
    width = options.ngram_len - 1
    if len(token_ids) <= width:
        raise InvalidArgument("token_ids", f"must be more than {width}: the first {width} are only context")
    places = range(width, len(token_ids))
    hashes = [context_hash(token_ids[place - width : place]) for place in places]
    recent: list[int] = [0] * options.context_history_size
    is_new = []
    for hashed in hashes:
        is_new.append(hashed not in recent)
        recent = [hashed, *recent[:-1]]
    end = next((place for place, one in enumerate(token_ids) if one in set(end_ids)), len(token_ids))
    mask_1T = torch.tensor([[new and place < end for new, place in zip(is_new, places, strict=True)]])
    ids_T = torch.tensor([token_ids[place] for place in places], dtype=torch.int64)
    layers = list(g_values(options, coin_flips(options), torch.tensor(hashes, dtype=torch.int64), ids_T))
    g_1TL = torch.stack(layers, -1)[None]
    scores: Any = detector(g_1TL, mask_1T, return_dict=True).posterior_probabilities
    return float(scores.flatten()[0])
