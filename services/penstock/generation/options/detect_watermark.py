"""DetectWatermark as plain data: the request and its checks. No torch, no proto."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import AnyWatermark
from penstock.generation.options.compound_kinds import WATERMARK
from penstock.generation.options.kinds import check_vocabulary
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import ModelFacts
from penstock.generation.options.validate import check_model

DEFAULT_Z_THRESHOLD = 3.0


@dataclass(frozen=True, slots=True)
class DetectWatermarkCommand:
    """A DetectWatermarkRequest as plain data."""

    token_ids: list[int]
    model: str = ""
    # None: the model's own, or else transformers' defaults.
    watermark: AnyWatermark | None = None
    z_threshold: float = DEFAULT_Z_THRESHOLD
    ignore_repeated_ngrams: bool = False


def check_detect_watermark(command: DetectWatermarkCommand, model: ModelFacts, limits: RequestLimits) -> None:
    """Check the request. Raises NotFound (model) and InvalidArgument naming the proto field."""
    check_model(command.model, model.name)
    if not 1 <= len(command.token_ids) <= limits.max_watermark_tokens:
        raise InvalidArgument("token_ids", f"must have between 1 and {limits.max_watermark_tokens} entries")
    check_vocabulary("token_ids", command.token_ids, model.vocab_size)
    if not math.isfinite(command.z_threshold):
        raise InvalidArgument("z_threshold", "must be finite")
    if command.watermark is not None:
        WATERMARK.check(command.watermark, "watermarking_config")
        WATERMARK.check_limit(command.watermark, "watermarking_config", limits, "max_watermark_context")
