"""Warning at a start about a number format that costs more accuracy than its user may expect."""

from __future__ import annotations

from penstock.common.logging import get_logger
from penstock.generation.layers.linear.base import INT4
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel

_log = get_logger("penstock.generation")

# Cost of a format that is made at load, on real weights (dev/log/real-weights.md), and what to do about it. A format
# that stays near to float32 has no row.
SURPRISES = {
    INT4: (
        "on real models about every sixth of the likeliest tokens is another than in float32 (int8: every 21st)",
        "--quantization int8, or a checkpoint that was quantised with care, which keeps its numbers; "
        "`penstock eval` measures it",
    )
}


def warn_of_format(quantization: str, model: LanguageModel) -> None:
    """Log a warning for weights that were quantised at load, or by `penstock pack`, into a format with a row above."""
    if model.config.checkpoint_format:
        # Its numbers are those that its maker chose.
        return
    form = quantization
    if isinstance(model, CausalLM) and model.layers:
        form = model.layers[0].quantisable[0].quantised_as
    if form in SURPRISES:
        cost, advice = SURPRISES[form]
        _log.warning("this number format is far from float32", format=form, cost=cost, advice=advice)
