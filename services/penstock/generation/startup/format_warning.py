"""Warning at a start about a number format that costs more accuracy than its user may expect."""

from __future__ import annotations

import torch

from penstock.common.logging import get_logger
from penstock.generation.layers.linear.base import INT4, INT8
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel

_log = get_logger("penstock.generation")

# Cost of a format that is made at load, on real weights (dev/log/real-weights.md), and what to do about it. A format
# that stays near to float32 has no row.
SURPRISES = {
    INT4: (
        "on real models every fifth or sixth of the likeliest tokens is another than in float32 (int8: every 18th or "
        "20th)",
        "--quantization int8, or a checkpoint that was quantised with care, which keeps its numbers; "
        "`penstock eval` measures it",
    )
}
# Likewise, of a checkpoint's own numbers.
KEPT_SURPRISES = {
    INT8: (
        "the weights are the checkpoint's, but a row of inputs is rounded to bytes by its largest number: on real "
        "models about every seventh of the likeliest tokens is another than in float32",
        "--quantization none, which rounds no inputs, or the unquantised model with --quantization int8, which turns "
        "them first; `penstock eval` measures it",
    )
}


def warn_of_format(quantization: str, model: LanguageModel) -> None:
    """Log a warning for weights that run in a format with a row above: quantised at load or by `penstock pack`, or kept
    as a quantised checkpoint has them."""
    config = model.config
    if config.checkpoint_format:
        # A form that most matrices keep, and not one that --quantization made of others.
        form, known = config.kept_form, KEPT_SURPRISES
        if form not in dict(config.weight_forms):
            return
    else:
        form, known = quantization, SURPRISES
        if isinstance(model, CausalLM) and model.layers:
            form = _form_of(model)
    if form in known:
        cost, advice = known[form]
        _log.warning("this number format is far from float32", format=form, cost=cost, advice=advice)


def warn_of_whole_weights(model: LanguageModel, *, is_packed: bool) -> None:
    """Log a warning where --compact-weights on changes nothing."""
    is_quantised = isinstance(model, CausalLM) and bool(model.layers) and bool(_form_of(model))
    if is_packed:
        cause = "a folder of `penstock pack` is read as it is"
    elif is_quantised or model.dtype is not torch.bfloat16:
        cause = "it is for weights in bfloat16, and these are not"
    else:
        return
    _log.warning("--compact-weights on changes nothing here", cause=cause)


def _form_of(model: CausalLM) -> str:
    """Format of the first layer's matrices; empty: they are numbers of the model's dtype."""
    return model.layers[0].quantisable[0].quantised_as
