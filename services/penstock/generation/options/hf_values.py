"""Values of generation_config.json as options: JSON in transformers' forms to the plain types of RequestedOptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.generation.core.modes import AssistantSchedule, EarlyStopping, WatermarkOptions
from penstock.generation.options.request_options import Alternatives, RequestedOptions, TokenSequence

_INTEGERS = (
    "max_new_tokens",
    "min_new_tokens",
    "max_length",
    "min_length",
    "num_return_sequences",
    "num_beams",
    "num_beam_groups",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "top_k",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "seed",
)
_NUMBERS = (
    "max_time",
    "diversity_penalty",
    "length_penalty",
    "penalty_alpha",
    "assistant_confidence_threshold",
    "guidance_scale",
    "temperature",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_FLAGS = ("do_sample", "renormalize_logits", "remove_invalid_values", "token_healing")


class BadValue(Exception):
    """A value of the wrong type; the text goes on from "generation_config.json of the model"."""


def options_of(values: Mapping[str, Any]) -> RequestedOptions:
    """The options among `values`, which hold no null. An empty list is unset. Raises BadValue."""
    return RequestedOptions.of(
        **{name: parse(name, values[name]) for name, parse in PARSERS.items() if values.get(name, []) not in ([], {})}
    )


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadValue(f"has {name} that is not a number")
    if not math.isfinite(value) or value != int(value):
        raise BadValue(f"has {name} that is not an integer")
    if value < 0:
        raise BadValue(f"has an impossible value: {name} must be >= 0")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadValue(f"has {name} that is not a number")
    try:
        return float(value)
    except OverflowError as error:  # Python's JSON has integers of any length
        raise BadValue(f"has {name} that is not a finite number") from error


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue(f"has {name} that is neither true nor false")
    return value


def _ids(name: str, value: Any) -> TokenSequence:
    if not isinstance(value, list) or not all(type(token_id) is int and token_id >= 0 for token_id in value):
        raise BadValue(f"has {name} that is no list of ids")
    return tuple(value)


def _id_or_ids(name: str, value: Any) -> TokenSequence:
    return _ids(name, value if isinstance(value, list) else [value])


def _sequences(name: str, value: Any) -> tuple[TokenSequence, ...]:
    if not isinstance(value, list):
        raise BadValue(f"has {name} that is no list of lists of ids")
    return tuple(_ids(name, entry) for entry in value)


def _force_words(name: str, value: Any) -> tuple[Alternatives, ...]:
    """Each entry is a list of ids, or a list of alternatives."""
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise BadValue(f"has {name} that is no list of lists of ids")
    return tuple(
        _sequences(name, entry) if entry and isinstance(entry[0], list) else (_ids(name, entry),) for entry in value
    )


def _sequence_bias(name: str, value: Any) -> tuple[tuple[TokenSequence, float], ...]:
    """JSON's form of it: [[[ids…], bias], …]."""
    if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        raise BadValue(f"has {name} that is no list of [ids, bias]")
    return tuple((_ids(name, ids), _number(name, bias)) for ids, bias in value)


def _decay(name: str, value: Any) -> tuple[int, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise BadValue(f"has {name} that is not [start_index, decay_factor]")
    return _integer(name, value[0]), _number(name, value[1])


def _early_stopping(name: str, value: Any) -> EarlyStopping:
    known = {True: EarlyStopping.TRUE, False: EarlyStopping.FALSE, "never": EarlyStopping.NEVER}
    if not isinstance(value, (bool, str)) or value not in known:
        raise BadValue(f'has {name} that is not true, false or "never"')
    return known[value]


def _schedule(name: str, value: Any) -> AssistantSchedule:
    try:
        return AssistantSchedule(value)
    except ValueError as error:
        raise BadValue(f"has {name} that is no known schedule") from error


def _layers(name: str, value: Any) -> str | TokenSequence:
    return value if isinstance(value, str) else _ids(name, value)


def _watermark(name: str, value: Any) -> WatermarkOptions:
    parsers: dict[str, Callable[[str, Any], Any]] = {
        "greenlist_ratio": _number,
        "bias": _number,
        "hashing_key": _integer,
        "context_width": _integer,
        "seeding_scheme": lambda _, scheme: scheme,
    }
    if not isinstance(value, dict) or not set(value) <= set(parsers):
        raise BadValue(f"has {name} with fields other than {', '.join(sorted(parsers))}")
    return WatermarkOptions(**{key: parsers[key](f"{name}.{key}", member) for key, member in value.items()})


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_FLAGS, _flag),
    "early_stopping": _early_stopping,
    "force_words_ids": _force_words,
    "num_assistant_tokens_schedule": _schedule,
    "dola_layers": _layers,
    "bad_words_ids": _sequences,
    "forced_eos_token_id": _id_or_ids,
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "sequence_bias": _sequence_bias,
    "watermarking_config": _watermark,
}
