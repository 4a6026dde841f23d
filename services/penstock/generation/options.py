"""Which option values are possible and which are not in this release: one table each, for requests and model files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.requested import RequestedOptions

MAX_SEED = 2**63 - 1
UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"


@dataclass(frozen=True, slots=True)
class Bounds:
    """A closed interval, open below when `above` is set; `high` None means unbounded."""

    low: float
    high: float | None = None
    above: bool = False

    def allow(self, value: float) -> bool:
        """Whether a finite `value` lies within; False for NaN and infinities."""
        if not math.isfinite(value):
            return False
        over_low = value > self.low if self.above else value >= self.low
        return over_low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is not None:
            return f"must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"
        return f"must be finite and {'>' if self.above else '>='} {self.low:g}"


# seeds.md A and C. top_p = 0 keeps the most likely token only and temperature = 0 is greedy; top_k = 0 is off.
BOUNDS: Mapping[str, Bounds] = {
    "max_new_tokens": Bounds(1),
    "min_new_tokens": Bounds(0),
    "max_length": Bounds(1),
    "min_length": Bounds(0),
    "max_time": Bounds(0.0, above=True),
    "num_return_sequences": Bounds(1),
    "temperature": Bounds(0.0),
    "top_k": Bounds(0),
    "top_p": Bounds(0.0, 1.0),
    "min_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.0, above=True),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "presence_penalty": Bounds(-2.0, 2.0),
}

# Fields whose modes and processors come with later releases, and the values that leave them off in transformers 5.x.
# An empty tuple: any set value is refused.
LATER: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "prompt_lookup_num_tokens": (0,),
    "max_matching_ngram_size": (),
    "assistant_model": ("",),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "negative_prompt_text": (),
    "negative_prompt_ids": (),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "allowed_token_ids": (),
    "allowed_token_trie": (),
}

# Meaningless without beams: transformers warns, and so do we. Values that go without a warning.
BEAM_ONLY: Mapping[str, tuple[object, ...]] = {"length_penalty": (1.0,), "early_stopping": ("false",)}
EARLY_STOPPING = ("false", "true", "never")


def unsupported(field: str) -> InvalidArgument:
    """The answer to a field that this release does not have."""
    return InvalidArgument(field, "is not available in this release", reason=UNSUPPORTED_FIELD)


def is_off(name: str, value: object) -> bool:
    """Whether `value` switches the later field `name` off."""
    return value in LATER.get(name, ())


def check_options(options: RequestedOptions, *, prefix: str = "config.") -> None:
    """Check each option by itself. Raises InvalidArgument naming `prefix` + field."""
    for name, bounds in BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not bounds.allow(value):
            raise InvalidArgument(prefix + name, str(bounds))
    if options.seed is not None:
        check_seed(options.seed, prefix + "seed")
    if not all(math.isfinite(bias) for bias in options.logit_bias.values()):
        raise InvalidArgument(prefix + "logit_bias", "every bias must be finite")
    for name, other in options.others.items():
        if name in BEAM_ONLY:
            check_beam_only(name, other, prefix)
        elif not is_off(name, other):
            raise unsupported(prefix + name)


def check_seed(seed: int, field: str) -> None:
    """Raises InvalidArgument when `seed` is outside [0, 2^63 - 1]."""
    if not 0 <= seed <= MAX_SEED:
        raise InvalidArgument(field, "must be in [0, 2^63 - 1]")


def check_beam_only(name: str, value: object, prefix: str) -> None:
    """Even an option without effect has to be possible."""
    if name == "early_stopping" and value not in EARLY_STOPPING:
        raise InvalidArgument(prefix + name, "must be false, true or never")
    if name == "length_penalty" and not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise InvalidArgument(prefix + name, "must be a finite number")
