"""penstock.v1.GenerationConfig to RequestedOptions and back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.generation.core.modes import AssistantSchedule, EarlyStopping, WatermarkOptions
from penstock.generation.options.generate_options import RequestLimits
from penstock.generation.options.request_options import Alternatives, RequestedOptions, TokenSequence
from penstock.v1 import common_pb2, config_pb2

_EARLY_STOPPING = {
    config_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    config_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    config_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_SCHEDULE = {
    config_pb2.ASSISTANT_TOKENS_SCHEDULE_CONSTANT: AssistantSchedule.CONSTANT,
    config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC: AssistantSchedule.HEURISTIC,
    config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC_TRANSIENT: AssistantSchedule.HEURISTIC_TRANSIENT,
}
DEFAULT_LIMITS = RequestLimits()


def as_written(value: float) -> float:
    """The shortest decimal that is this float32: 0.7 rather than the 0.699999988 that travelled."""
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def check_count(field: str, entries: Collection[Any], most: int) -> None:
    """Raises InvalidArgument when `field` has more than `most` entries."""
    if len(entries) > most:
        raise InvalidArgument(field, f"must have at most {most} entries")


def to_options(config: config_pb2.GenerationConfig, limits: RequestLimits = DEFAULT_LIMITS) -> RequestedOptions:
    """The set fields of a GenerationConfig, unchecked but for the sizes of lists and for what has no plain form.

    Raises InvalidArgument for a list beyond its bound, an unknown enum value, an empty oneof and for
    negative_prompt_text.
    """
    values: dict[str, Any] = {}
    for descriptor, value in config.ListFields():
        convert = _CONVERTERS.get(descriptor.name)
        if convert is not None:
            value = convert(value, limits)
        elif isinstance(value, float) and descriptor.name != "max_time":
            value = as_written(value)
        if value is not None:
            values[descriptor.name] = value
    return RequestedOptions.of(**values)


def _sequences(name: str, count: str) -> Callable[[Iterable[common_pb2.TokenIds], RequestLimits], tuple[Any, ...]]:
    """Converter of a repeated TokenIds that may have as many entries as the limit `count` says."""

    def convert(entries: Any, limits: RequestLimits) -> tuple[TokenSequence, ...]:
        check_count(name, entries, getattr(limits, count))
        return tuple(_phrase(name, entry.ids, limits) for entry in entries)

    name = f"config.{name}"
    return convert


def _ids(name: str, count: str) -> Callable[[Collection[int], RequestLimits], TokenSequence]:
    """Converter of a repeated id that may have as many entries as the limit `count` says."""

    def convert(ids: Collection[int], limits: RequestLimits) -> TokenSequence:
        check_count(name, ids, getattr(limits, count))
        return tuple(ids)

    name = f"config.{name}"
    return convert


def _phrase(field: str, ids: Collection[int], limits: RequestLimits) -> TokenSequence:
    if len(ids) > limits.max_phrase_tokens:
        raise InvalidArgument(field, f"every entry must hold at most {limits.max_phrase_tokens} ids")
    return tuple(ids)


def _alternatives(field: str, word: config_pb2.WordAlternatives, limits: RequestLimits) -> Alternatives:
    if len(word.alternatives) > limits.max_alternatives:
        raise InvalidArgument(field, f"every entry must have at most {limits.max_alternatives} alternatives")
    return tuple(_phrase(field, entry.ids, limits) for entry in word.alternatives)


def _force_words(words: Any, limits: RequestLimits) -> tuple[Alternatives, ...]:
    field = "config.force_words_ids"
    check_count(field, words, limits.max_forced_words)
    return tuple(_alternatives(field, word, limits) for word in words)


def _constraints(constraints: Any, limits: RequestLimits) -> tuple[Alternatives, ...]:
    field = "config.constraints"
    check_count(field, constraints, limits.max_forced_words)
    return tuple(_constraint(field, constraint, limits) for constraint in constraints)


def _constraint(field: str, constraint: config_pb2.DecodingConstraint, limits: RequestLimits) -> Alternatives:
    match constraint.WhichOneof("kind"):
        case "phrasal":
            return (_phrase(field, constraint.phrasal.ids, limits),)
        case "disjunctive":
            return _alternatives(field, constraint.disjunctive, limits)
        case _:
            raise InvalidArgument(field, "every entry must be phrasal or disjunctive")


def _trie(trie: config_pb2.AllowedTokenTrie, limits: RequestLimits) -> tuple[TokenSequence, ...]:
    field = "config.allowed_token_trie"
    check_count(field, trie.sequences, limits.max_trie_sequences)
    if sum(len(entry.ids) for entry in trie.sequences) > limits.max_trie_tokens:
        raise InvalidArgument(field, f"must hold at most {limits.max_trie_tokens} ids altogether")
    return tuple(tuple(entry.ids) for entry in trie.sequences)


def _bias(entries: Any, limits: RequestLimits) -> tuple[tuple[TokenSequence, float], ...]:
    field = "config.sequence_bias"
    check_count(field, entries, limits.max_sequence_bias)
    return tuple((_phrase(field, entry.token_ids, limits), as_written(entry.bias)) for entry in entries)


def _logit_bias(biases: Any, limits: RequestLimits) -> dict[int, float]:
    check_count("config.logit_bias", biases, limits.max_logit_bias)
    return {token_id: as_written(bias) for token_id, bias in biases.items()}


def _layers(layers: config_pb2.DolaLayers, limits: RequestLimits) -> str | TokenSequence:
    match layers.WhichOneof("layers"):
        case "preset":
            return layers.preset
        case "indices":
            check_count("config.dola_layers", layers.indices.indices, limits.max_dola_layers)
            return tuple(layers.indices.indices)
        case _:
            raise InvalidArgument("config.dola_layers", "preset or indices must be set")


def to_watermark(config: config_pb2.WatermarkingConfig, _: RequestLimits = DEFAULT_LIMITS) -> WatermarkOptions:
    """A WatermarkingConfig with transformers' defaults for what is unset, unchecked."""
    given = {field.name: value for field, value in config.ListFields()}
    for name in ("greenlist_ratio", "bias"):
        if name in given:
            given[name] = as_written(given[name])
    return WatermarkOptions(**given)


def _enum(field: str, names: dict[Any, Any]) -> Callable[[int, RequestLimits], object]:
    """Converter of an enum; its UNSPECIFIED is unset."""

    def convert(value: int, _: RequestLimits) -> object:
        if value and value not in names:
            raise InvalidArgument(f"config.{field}", "is none of the values of its enum")
        return names.get(value)

    return convert


def _negative_text(_: str, __: RequestLimits) -> object:
    raise InvalidArgument("config.negative_prompt_text", "is for the router, which tokenizes it: send ids here")


_CONVERTERS: dict[str, Callable[[Any, RequestLimits], Any]] = {
    "early_stopping": _enum("early_stopping", _EARLY_STOPPING),
    "num_assistant_tokens_schedule": _enum("num_assistant_tokens_schedule", _SCHEDULE),
    "dola_layers": _layers,
    "negative_prompt_text": _negative_text,
    # As long as a prompt: bounded by the size of a message and checked against the context.
    "negative_prompt_ids": lambda prompt, _: tuple(prompt.ids),
    "bad_words_ids": _sequences("bad_words_ids", "max_bad_words"),
    "force_words_ids": _force_words,
    "constraints": _constraints,
    "forced_eos_token_id": _ids("forced_eos_token_id", "max_eos_token_ids"),
    "exponential_decay_length_penalty": lambda decay, _: (decay.start_index, as_written(decay.decay_factor)),
    "suppress_tokens": _ids("suppress_tokens", "max_suppress_tokens"),
    "begin_suppress_tokens": _ids("begin_suppress_tokens", "max_suppress_tokens"),
    "sequence_bias": _bias,
    "watermarking_config": to_watermark,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _ids("allowed_token_ids", "max_allowed_tokens"),
    "allowed_token_trie": _trie,
}


def from_options(options: RequestedOptions) -> config_pb2.GenerationConfig:
    """The inverse of `to_options`; equal to it but for constraints, which come back as disjunctive."""
    config = config_pb2.GenerationConfig()
    for name, value in options.items():
        fill = _FILLERS.get(name)
        if fill is not None:
            fill(config, value)
        elif isinstance(value, tuple):
            getattr(config, name).extend(value)
        else:
            setattr(config, name, value)
    return config


def _token_ids(sequences: Iterable[TokenSequence]) -> list[common_pb2.TokenIds]:
    return [common_pb2.TokenIds(ids=ids) for ids in sequences]


def _word(alternatives: Alternatives) -> config_pb2.WordAlternatives:
    return config_pb2.WordAlternatives(alternatives=_token_ids(alternatives))


def _fill_layers(config: config_pb2.GenerationConfig, layers: str | TokenSequence) -> None:
    if isinstance(layers, str):
        config.dola_layers.preset = layers
    else:
        config.dola_layers.indices.indices.extend(layers)


def _fill_watermark(config: config_pb2.GenerationConfig, watermark: WatermarkOptions) -> None:
    message = config.watermarking_config
    message.greenlist_ratio, message.bias = watermark.greenlist_ratio, watermark.bias
    message.hashing_key, message.context_width = watermark.hashing_key, watermark.context_width
    message.seeding_scheme = watermark.seeding_scheme


def _fill_decay(config: config_pb2.GenerationConfig, decay: tuple[int, float]) -> None:
    penalty = config.exponential_decay_length_penalty
    penalty.start_index, penalty.decay_factor = decay


_NUMBERS = {plain: number for number, plain in (*_EARLY_STOPPING.items(), *_SCHEDULE.items())}
_FILLERS: dict[str, Callable[[config_pb2.GenerationConfig, Any], Any]] = {
    "early_stopping": lambda config, value: setattr(config, "early_stopping", _NUMBERS[value]),
    "num_assistant_tokens_schedule": lambda config, value: setattr(
        config, "num_assistant_tokens_schedule", _NUMBERS[value]
    ),
    "dola_layers": _fill_layers,
    "negative_prompt_ids": lambda config, ids: config.negative_prompt_ids.ids.extend(ids),
    "bad_words_ids": lambda config, words: config.bad_words_ids.extend(_token_ids(words)),
    "force_words_ids": lambda config, words: config.force_words_ids.extend(map(_word, words)),
    "constraints": lambda config, words: config.constraints.extend(
        config_pb2.DecodingConstraint(disjunctive=_word(word)) for word in words
    ),
    "exponential_decay_length_penalty": _fill_decay,
    "sequence_bias": lambda config, entries: config.sequence_bias.extend(
        config_pb2.SequenceBias(token_ids=ids, bias=bias) for ids, bias in entries
    ),
    "watermarking_config": _fill_watermark,
    "logit_bias": lambda config, biases: config.logit_bias.update(biases),
    "allowed_token_trie": lambda config, trie: config.allowed_token_trie.sequences.extend(_token_ids(trie)),
}
