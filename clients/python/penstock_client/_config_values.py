"""Conversion of options from transformers' Python values to messages, by their forms, and of structured output to a
Constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from penstock.v1 import common_pb2, config_pb2

from penstock_client._option_table import Words
from penstock_client._wrong_values import WrongType, WrongValue, expected, naming

Ids = Sequence[int]
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")
_EARLY_STOPPING = {
    False: config_pb2.EARLY_STOPPING_FALSE,
    True: config_pb2.EARLY_STOPPING_TRUE,
    "never": config_pb2.EARLY_STOPPING_NEVER,
}
_SCHEDULES = {
    "constant": config_pb2.ASSISTANT_TOKENS_SCHEDULE_CONSTANT,
    "heuristic": config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC,
    "heuristic_transient": config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC_TRANSIENT,
}


def set_option(message: Any, name: str, form: str, value: Any) -> None:
    """Set field `name` of GenerationConfig, StopConfig or OutputConfig from transformers' `value`.

    `form` is the option table's. Raises TypeError, ValueError or AttributeError.
    """
    _SETTERS[form](message, name, value)


def set_constraint(constraint: config_pb2.Constraint, options: Mapping[str, Any]) -> None:
    """Set the kind of structured output that `options` ask for. Raises ValueError for two kinds."""
    asked = [name for name in CONSTRAINTS if options.get(name) is not None]
    if len(asked) > 1:
        raise ValueError(f"options {asked[0]!r} and {asked[1]!r} do not go together")
    for name in asked:
        with naming(name, expected(constraint, name), options[name]):
            _set_kind(constraint, name, options[name])


def _set_kind(constraint: config_pb2.Constraint, name: str, value: Any) -> None:
    if name == "choice":
        if isinstance(value, str):
            raise WrongType("must be a list of strings")
        constraint.choice.values.extend(value)
    elif name == "json_schema" and not isinstance(value, str):
        constraint.json_schema = json.dumps(value)
    else:
        setattr(constraint, name, value)


def token_ids(ids: Ids) -> common_pb2.TokenIds:
    """One run of ids. Raises TypeError for a string."""
    if isinstance(ids, str):
        raise WrongType("must be token ids, not text")
    return common_pb2.TokenIds(ids=list(ids))


def _not_empty(value: Any) -> Any:
    """Refuse an empty list, as transformers does; on the wire it would look unset."""
    if len(value) == 0:
        raise WrongValue("must not be empty")
    return value


def _word(words: Words) -> config_pb2.WordAlternatives:
    alternatives = [words] if all(isinstance(entry, Integral) for entry in words) else words
    return config_pb2.WordAlternatives(alternatives=[token_ids(ids) for ids in alternatives])  # type: ignore[arg-type]


def _constraint(words: Any) -> config_pb2.DecodingConstraint:
    """Convert a phrase, alternatives, or an object with them as `token_ids`, like transformers' constraints."""
    word = _word(getattr(words, "token_ids", words))
    if len(word.alternatives) == 1:
        return config_pb2.DecodingConstraint(phrasal=word.alternatives[0])
    return config_pb2.DecodingConstraint(disjunctive=word)


def _set_bias(config: Any, name: str, biases: Any) -> None:
    entries: Iterable[Any] = biases.items() if isinstance(biases, Mapping) else biases
    _not_empty(biases)
    for ids, bias in entries:
        getattr(config, name).add(token_ids=token_ids(ids).ids, bias=bias)


def _set_logit_bias(config: Any, name: str, biases: Mapping[int, float] | Mapping[str, float]) -> None:
    """Set biases by id; OpenAI's keys are text."""
    getattr(config, name).update({int(key) if isinstance(key, str) else key: bias for key, bias in biases.items()})


def _set_layers(config: Any, name: str, layers: str | Ids) -> None:
    field = getattr(config, name)
    if isinstance(layers, str):
        field.preset = layers
    else:
        field.indices.indices.extend(layers)
        field.indices.SetInParent()


def watermarking_config(watermark: Any) -> config_pb2.WatermarkingConfig:
    """Convert a mapping, or either of transformers' configurations; SynthID's has keys.

    Raises TypeError, ValueError or AttributeError.
    """
    fields = dict(watermark if isinstance(watermark, Mapping) else watermark.to_dict())
    if "keys" not in fields:
        return config_pb2.WatermarkingConfig(**fields)
    if fields.pop("debug_mode", False):
        raise WrongValue("debug_mode is for tests of transformers itself")
    return config_pb2.WatermarkingConfig(synthid=config_pb2.SynthIDTextWatermarkingConfig(**fields))


def _set_watermark(config: Any, name: str, watermark: Any) -> None:
    getattr(config, name).CopyFrom(watermarking_config(watermark))


def _set_decay(config: Any, name: str, decay: tuple[int, float]) -> None:
    field = getattr(config, name)
    field.start_index, field.decay_factor = decay


def _set_negative_prompt(config: config_pb2.GenerationConfig, _: str, prompt: str | Ids) -> None:
    if isinstance(prompt, str):
        config.negative_prompt_text = prompt
    else:
        config.negative_prompt_ids.CopyFrom(token_ids(prompt))


def _set_ids(config: Any, name: str, value: int | Ids) -> None:
    getattr(config, name).extend([value] if isinstance(value, Integral) else value)


def has_runs(value: Any) -> bool:
    """True for end-of-sequence ids with runs of several ids among them."""
    return isinstance(value, Sequence) and any(isinstance(entry, list | tuple) for entry in value)


def set_ends(config: Any, stop: Any, value: Sequence[int | Ids]) -> None:
    """Set end-of-sequence ids, and runs of ids that also end a sequence, in place of the model's own."""
    runs: list[list[Any]] = [list(entry) if isinstance(entry, list | tuple) else [entry] for entry in value]
    singles = [run[0] for run in runs if len(run) == 1]
    for run in runs:
        if not run:
            raise WrongValue("must have no empty run of ids")
        if len(run) > 1:
            stop.stop_token_ids.append(token_ids(run))
    if singles:
        config.eos_token_id.extend(singles)
    else:
        stop.ignore_eos = True


def _set_plugins(config: Any, name: str, plugins: Any) -> None:
    """Set plugins by name: one, a list of names and (name, parameters), or parameters by name."""
    entries: Iterable[Any] = plugins.items() if isinstance(plugins, Mapping) else plugins
    for entry in [plugins] if isinstance(plugins, str) else entries:
        one, parameters = (entry, None) if isinstance(entry, str) else entry
        text = "" if not parameters else json.dumps(dict(parameters), allow_nan=False)
        getattr(config, name).add(name=one, parameters=text)


def _set_stop_sequences(stop: Any, name: str, value: Any) -> None:
    entries: Iterable[Any] = [value] if isinstance(value, Integral) else value
    made = common_pb2.TokenIds
    # Plain ids may be a quarter of a million: nothing is called for one but what makes it.
    getattr(stop, name).extend(
        [
            made(ids=(entry,))
            if type(entry) is int
            else token_ids([int(entry)] if isinstance(entry, Integral) else entry)
            for entry in entries
        ]
    )


def _set_trie(config: Any, name: str, trie: Sequence[Ids]) -> None:
    getattr(config, name).CopyFrom(config_pb2.AllowedTokenTrie(sequences=[token_ids(ids) for ids in trie]))


def _choose(known: Mapping[Any, int]) -> Callable[[Any, str, Any], None]:
    def set_enum(config: Any, name: str, value: Any) -> None:
        if not isinstance(value, (bool, str)) or value not in known:
            raise WrongValue(f"must be one of {', '.join(map(repr, known))}")
        setattr(config, name, known[value])

    return set_enum


def _each(made: Callable[[Any], Any]) -> Callable[[Any, str, Any], None]:
    def set_entries(config: Any, name: str, value: Any) -> None:
        getattr(config, name).extend(map(made, _not_empty(value)))

    return set_entries


# Form of the option table -> function that sets a field.
_SETTERS: dict[str, Callable[[Any, str, Any], None]] = {
    "plain": setattr,
    "plugins": _set_plugins,
    "early_stopping": _choose(_EARLY_STOPPING),
    "schedule": _choose(_SCHEDULES),
    "layers": _set_layers,
    "prompt": _set_negative_prompt,
    "sequences": _each(token_ids),
    "words": _each(_word),
    "constraints": _each(_constraint),
    "numbers": lambda message, name, value: getattr(message, name).extend(value),
    "ids": _set_ids,
    "decay": _set_decay,
    "sequence_bias": _set_bias,
    "watermark": _set_watermark,
    "logit_bias": _set_logit_bias,
    "trie": _set_trie,
    "strings": lambda message, name, value: getattr(message, name).extend([value] if isinstance(value, str) else value),
    "stop_sequences": _set_stop_sequences,
}
