"""DetectWatermark as plain data: what is asked, and its checks. No torch, no proto."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.core.modes import WatermarkOptions
from penstock.generation.options.checks import check_watermark
from penstock.generation.options.generate_options import RequestLimits, ServedModel
from penstock.generation.options.token_ids import check_vocabulary
from penstock.generation.options.validate import check_model

DEFAULT_Z_THRESHOLD = 3.0


@dataclass(frozen=True, slots=True)
class DetectWatermarkCommand:
    """DetectWatermarkRequest."""

    token_ids: list[int]
    model: str = ""
    # None: the model's own, or else transformers' defaults.
    watermark: WatermarkOptions | None = None
    z_threshold: float = DEFAULT_Z_THRESHOLD
    ignore_repeated_ngrams: bool = False


def check_detect_watermark(command: DetectWatermarkCommand, model: ServedModel, limits: RequestLimits) -> None:
    """Raises NotFound (model) and InvalidArgument naming the proto field."""
    check_model(command.model, model.name)
    if not 1 <= len(command.token_ids) <= limits.max_watermark_tokens:
        raise InvalidArgument("token_ids", f"must have between 1 and {limits.max_watermark_tokens} entries")
    check_vocabulary("token_ids", command.token_ids, model.vocab_size)
    if not math.isfinite(command.z_threshold):
        raise InvalidArgument("z_threshold", "must be finite")
    if command.watermark is not None:
        check_watermark(command.watermark, "watermarking_config.")
        if command.watermark.context_width > limits.max_watermark_context:
            raise InvalidArgument(
                "watermarking_config.context_width", f"must be at most {limits.max_watermark_context}"
            )
