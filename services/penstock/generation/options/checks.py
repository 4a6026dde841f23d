"""Which value each option may have by itself: one table, for requests and for models' files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.core.modes import WatermarkOptions
from penstock.generation.options.request_options import RequestedOptions

MAX_SEED = 2**63 - 1
# The watermark multiplies its key by token ids in 64 bits; transformers takes any key that torch does.
MAX_HASHING_KEY = 2**63 - 1
WATERMARK_SCHEMES = ("lefthash", "selfhash")
DOLA_PRESETS = ("low", "high")


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of finite numbers, open below when `above` is set and open above when `below` is; None: no bound."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def allow(self, value: float) -> bool:
        """Whether `value` lies within; False for NaN and infinities."""
        if not math.isfinite(value):
            return False
        over_low = self.low is None or (value > self.low if self.above else value >= self.low)
        return over_low and (self.high is None or (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        if self.low is None:
            return "must be finite"
        if self.high is None:
            return f"must be finite and {'>' if self.above else '>='} {self.low:g}"
        return f"must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"


_POSITIVE, _COUNT, _SIZE, _FINITE = Bounds(0.0, above=True), Bounds(1), Bounds(0), Bounds()
_SHARE, _CUTOFF, _PENALTY = Bounds(0.0, 1.0), Bounds(0.0, 1.0, below=True), Bounds(-2.0, 2.0)

# As transformers' validate() and the processors' constructors, but that a value which means "off" is allowed: 0 of
# temperature (greedy), top_k, epsilon_cutoff, eta_cutoff, n-gram sizes and prompt_lookup_num_tokens, 1 of typical_p.
BOUNDS: Mapping[str, Bounds] = {
    "max_new_tokens": _COUNT,
    "min_new_tokens": _SIZE,
    "max_length": _COUNT,
    "min_length": _SIZE,
    "max_time": _POSITIVE,
    "num_beams": _COUNT,
    "num_beam_groups": _COUNT,
    "diversity_penalty": Bounds(0.0),
    "length_penalty": _FINITE,
    "penalty_alpha": Bounds(0.0),
    "num_return_sequences": _COUNT,
    "prompt_lookup_num_tokens": _SIZE,
    "max_matching_ngram_size": _COUNT,
    "num_assistant_tokens": _COUNT,
    "assistant_confidence_threshold": _SHARE,
    "guidance_scale": _FINITE,
    "temperature": Bounds(0.0),
    "top_k": _SIZE,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": Bounds(0.0, 1.0, above=True),
    "typical_p": Bounds(0.0, 1.0, above=True),
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "repetition_penalty": _POSITIVE,
    "encoder_repetition_penalty": _POSITIVE,
    "no_repeat_ngram_size": _SIZE,
    "encoder_no_repeat_ngram_size": _SIZE,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}
_DECAY_FACTOR = _POSITIVE
_GREENLIST_RATIO = Bounds(0.0, 1.0, above=True, below=True)


def check_options(options: RequestedOptions, *, prefix: str = "config.") -> None:
    """Check each option by itself. Raises InvalidArgument naming `prefix` + field."""
    for name, value in options.items():
        bounds = BOUNDS.get(name)
        if bounds is not None and not bounds.allow(value):
            raise InvalidArgument(prefix + name, str(bounds))
    if options.seed is not None:
        check_seed(options.seed, prefix + "seed")
    _check_layers(options.dola_layers, prefix + "dola_layers")
    processors = options.processors
    if not all(map(math.isfinite, (processors.logit_bias or {}).values())):
        raise InvalidArgument(prefix + "logit_bias", "every bias must be finite")
    for _, bias in processors.sequence_bias or ():
        if math.isnan(bias) or bias == math.inf:
            raise InvalidArgument(prefix + "sequence_bias", "every bias must be finite or -inf")
    if processors.exponential_decay_length_penalty is not None:
        _, factor = processors.exponential_decay_length_penalty
        if not _DECAY_FACTOR.allow(factor):
            field = prefix + "exponential_decay_length_penalty.decay_factor"
            raise InvalidArgument(field, str(_DECAY_FACTOR))
    if processors.watermarking_config is not None:
        check_watermark(processors.watermarking_config, prefix + "watermarking_config.")


def check_seed(seed: int, field: str) -> None:
    """Raises InvalidArgument when `seed` is outside [0, 2^63 - 1]."""
    if not 0 <= seed <= MAX_SEED:
        raise InvalidArgument(field, "must be in [0, 2^63 - 1]")


def _check_layers(layers: str | tuple[int, ...] | None, field: str) -> None:
    if isinstance(layers, str) and layers not in DOLA_PRESETS:
        raise InvalidArgument(field, "must be low, high or layer numbers")
    if layers == ():
        raise InvalidArgument(field, "must hold at least one layer")


def check_watermark(watermark: WatermarkOptions, prefix: str) -> None:
    """Check a watermark by itself. Raises InvalidArgument naming `prefix` + field."""
    if not _GREENLIST_RATIO.allow(watermark.greenlist_ratio):
        raise InvalidArgument(prefix + "greenlist_ratio", str(_GREENLIST_RATIO))
    if not _FINITE.allow(watermark.bias):
        raise InvalidArgument(prefix + "bias", str(_FINITE))
    if not 0 <= watermark.hashing_key <= MAX_HASHING_KEY:
        raise InvalidArgument(prefix + "hashing_key", "must be in [0, 2^63 - 1]")
    if watermark.seeding_scheme not in WATERMARK_SCHEMES:
        raise InvalidArgument(prefix + "seeding_scheme", "must be lefthash or selfhash")
    if watermark.context_width < 1:
        raise InvalidArgument(prefix + "context_width", "must be >= 1")
