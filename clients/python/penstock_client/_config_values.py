"""transformers' Python values of GenerationConfig's fields as the wire's, and structured output as a Constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from penstock.v1 import common_pb2, config_pb2

Ids = Sequence[int]
# One phrase, or alternatives one of which must appear.
Words = Ids | Sequence[Ids]
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


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What a value is refused with names its option."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"option {name!r}: {error}") from error


def set_config(config: config_pb2.GenerationConfig, name: str, value: Any) -> None:
    """Set field `name` to transformers' `value` for it. Raises TypeError, ValueError or AttributeError."""
    setter = _SETTERS.get(name)
    if setter is not None:
        setter(config, value)
    else:
        setattr(config, name, value)


def set_constraint(constraint: config_pb2.Constraint, options: Mapping[str, Any]) -> None:
    """Set the one kind of structured output that `options` ask for. Raises ValueError for two of them."""
    asked = [name for name in CONSTRAINTS if options.get(name) is not None]
    if len(asked) > 1:
        raise ValueError(f"options {asked[0]!r} and {asked[1]!r} do not go together")
    for name in asked:
        with naming(name):
            _set_kind(constraint, name, options[name])


def _set_kind(constraint: config_pb2.Constraint, name: str, value: Any) -> None:
    if name == "choice":
        if isinstance(value, str):
            raise TypeError("must be a list of strings")
        constraint.choice.values.extend(value)
    elif name == "json_schema" and not isinstance(value, str):
        constraint.json_schema = json.dumps(value)
    else:
        setattr(constraint, name, value)


def token_ids(ids: Ids) -> common_pb2.TokenIds:
    """One run of ids. Raises TypeError for a string."""
    if isinstance(ids, str):
        raise TypeError("must be token ids, not text")
    return common_pb2.TokenIds(ids=list(ids))


def _not_empty(value: Any) -> Any:
    """As transformers, which refuses an empty list here; on the wire it would be as good as unset."""
    if len(value) == 0:
        raise ValueError("must not be empty")
    return value


def _word(words: Words) -> config_pb2.WordAlternatives:
    alternatives = [words] if all(isinstance(entry, Integral) for entry in words) else words
    return config_pb2.WordAlternatives(alternatives=[token_ids(ids) for ids in alternatives])  # type: ignore[arg-type]


def _constraint(words: Any) -> config_pb2.DecodingConstraint:
    """A phrase, alternatives, or an object that has them as `token_ids`, as transformers' constraints do."""
    word = _word(getattr(words, "token_ids", words))
    if len(word.alternatives) == 1:
        return config_pb2.DecodingConstraint(phrasal=word.alternatives[0])
    return config_pb2.DecodingConstraint(disjunctive=word)


def _set_bias(config: config_pb2.GenerationConfig, biases: Any) -> None:
    entries: Iterable[Any] = biases.items() if isinstance(biases, Mapping) else biases
    _not_empty(biases)
    for ids, bias in entries:
        config.sequence_bias.add(token_ids=token_ids(ids).ids, bias=bias)


def _set_layers(config: config_pb2.GenerationConfig, layers: str | Ids) -> None:
    if isinstance(layers, str):
        config.dola_layers.preset = layers
    else:
        config.dola_layers.indices.indices.extend(layers)
        config.dola_layers.indices.SetInParent()


def watermarking_config(watermark: Any) -> config_pb2.WatermarkingConfig:
    """A mapping, or transformers' WatermarkingConfig. Raises TypeError, ValueError or AttributeError."""
    return config_pb2.WatermarkingConfig(**(watermark if isinstance(watermark, Mapping) else watermark.to_dict()))


def _set_decay(config: config_pb2.GenerationConfig, decay: tuple[int, float]) -> None:
    start_index, decay_factor = decay
    config.exponential_decay_length_penalty.start_index = start_index
    config.exponential_decay_length_penalty.decay_factor = decay_factor


def _set_negative_prompt(config: config_pb2.GenerationConfig, prompt: str | Ids) -> None:
    if isinstance(prompt, str):
        config.negative_prompt_text = prompt
    else:
        config.negative_prompt_ids.CopyFrom(token_ids(prompt))


def _choose(name: str, known: Mapping[Any, int]) -> Callable[[config_pb2.GenerationConfig, Any], None]:
    def set_enum(config: config_pb2.GenerationConfig, value: Any) -> None:
        if not isinstance(value, (bool, str)) or value not in known:
            raise ValueError(f"must be one of {', '.join(map(repr, known))}")
        setattr(config, name, known[value])

    return set_enum


def _ids(name: str) -> Callable[[config_pb2.GenerationConfig, Any], None]:
    def set_ids(config: config_pb2.GenerationConfig, value: int | Ids) -> None:
        getattr(config, name).extend([value] if isinstance(value, Integral) else value)

    return set_ids


_SETTERS: dict[str, Callable[[config_pb2.GenerationConfig, Any], Any]] = {
    "early_stopping": _choose("early_stopping", _EARLY_STOPPING),
    "num_assistant_tokens_schedule": _choose("num_assistant_tokens_schedule", _SCHEDULES),
    "dola_layers": _set_layers,
    "negative_prompt": _set_negative_prompt,
    "negative_prompt_text": _set_negative_prompt,
    "negative_prompt_ids": _set_negative_prompt,
    "bad_words_ids": lambda config, words: config.bad_words_ids.extend(map(token_ids, _not_empty(words))),
    "force_words_ids": lambda config, words: config.force_words_ids.extend(map(_word, _not_empty(words))),
    "constraints": lambda config, words: config.constraints.extend(map(_constraint, _not_empty(words))),
    "forced_eos_token_id": _ids("forced_eos_token_id"),
    "exponential_decay_length_penalty": _set_decay,
    "suppress_tokens": _ids("suppress_tokens"),
    "begin_suppress_tokens": _ids("begin_suppress_tokens"),
    "sequence_bias": _set_bias,
    "watermarking_config": lambda config, watermark: config.watermarking_config.CopyFrom(
        watermarking_config(watermark)
    ),
    # OpenAI's keys are text.
    "logit_bias": lambda config, biases: config.logit_bias.update(
        {int(key) if isinstance(key, str) else key: bias for key, bias in biases.items()}
    ),
    "allowed_token_ids": _ids("allowed_token_ids"),
    "allowed_token_trie": lambda config, trie: config.allowed_token_trie.CopyFrom(
        config_pb2.AllowedTokenTrie(sequences=[token_ids(ids) for ids in trie])
    ),
}
