"""Kinds of options that have parts: sequences of ids, biases, words to force, DoLa's layers, the watermark."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.generation.core.decoding_mode import AnyWatermark, SynthIdOptions, WatermarkOptions
from penstock.generation.core.plugins import PluginChoice
from penstock.generation.options.kinds import (
    AT_LEAST_ONE,
    FINITE,
    FLAG,
    FLOAT32,
    INTEGER,
    POSITIVE,
    SEED_RANGE,
    SIZE,
    TOKEN_IDS,
    Alternatives,
    BadValue,
    Bounds,
    OptionKind,
    TokenSequence,
    as_written,
    check_count,
    check_vocabulary,
    refuse,
)

if TYPE_CHECKING:
    from penstock.generation.options.request_limits import RequestLimits

WATERMARK_SCHEMES = ("lefthash", "selfhash")
DOLA_PRESETS = ("low", "high")
# The watermark multiplies its key by token ids in 64 bits; transformers accepts any key that torch does.
_HASHING_KEY = SEED_RANGE
_GREENLIST_RATIO = Bounds(0.0, 1.0, above=True, below=True)
_DECAY_FACTOR = POSITIVE


def _phrase(ids: Collection[int], field: str, limits: RequestLimits) -> TokenSequence:
    if len(ids) > limits.max_phrase_tokens:
        refuse(field, f"every entry must hold at most {limits.max_phrase_tokens} ids")
    return tuple(ids)


def _add_all(repeated: Any, sequences: Iterable[TokenSequence]) -> None:
    for ids in sequences:
        repeated.add(ids=ids)


class Sequences(OptionKind):
    """Sequences of ids, as many as the row's limit, each a phrase."""

    form, hint = "sequences", "Sequence[Sequence[int]]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[TokenSequence, ...]:
        check_count(field, value, getattr(limits, limit))
        return tuple(_phrase(entry.ids, field, limits) for entry in value)

    def to_proto(self, message: Any, name: str, value: tuple[TokenSequence, ...]) -> None:
        _add_all(getattr(message, name), value)

    def from_json(self, name: str, value: Any) -> tuple[TokenSequence, ...]:
        if not isinstance(value, list):
            raise BadValue(f"has {name} that is not a list of lists of ids")
        return tuple(TOKEN_IDS.from_json(name, entry) for entry in value)

    def check_ids(self, value: Iterable[TokenSequence], field: str, vocab_size: int) -> None:
        if not all(value):
            refuse(field, "no entry may be empty")
        for ids in value:
            check_vocabulary(field, ids, vocab_size)


class StopSequences(Sequences):
    """Single ids and runs of ids that end a sequence."""

    form, hint = "stop_sequences", "int | Sequence[int | Sequence[int]]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[TokenSequence, ...]:
        check_count(field, value, getattr(limits, limit))
        return tuple(tuple(entry.ids) for entry in value)

    def check_limit(self, value: tuple[TokenSequence, ...], field: str, limits: RequestLimits, limit: str) -> None:
        check_count(field, value, getattr(limits, limit))
        if not all(1 <= len(ids) <= limits.max_stop_token_length for ids in value):
            refuse(field, f"every entry must hold between 1 and {limits.max_stop_token_length} ids")


class Trie(Sequences):
    """Paths from a trie's root."""

    form = "trie"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[TokenSequence, ...]:
        check_count(field, value.sequences, getattr(limits, limit))
        if sum(len(entry.ids) for entry in value.sequences) > limits.max_trie_tokens:
            refuse(field, f"must hold at most {limits.max_trie_tokens} ids altogether")
        return tuple(tuple(entry.ids) for entry in value.sequences)

    def to_proto(self, message: Any, name: str, value: tuple[TokenSequence, ...]) -> None:
        _add_all(getattr(message, name).sequences, value)

    def check_ids(self, value: Iterable[TokenSequence], field: str, vocab_size: int) -> None:
        if value == ():
            refuse(field, "must hold at least one sequence")
        super().check_ids(value, field, vocab_size)


class Words(OptionKind):
    """Words to force, as many as the row's limit, each by its alternatives."""

    form, hint = "words", "Sequence[Words]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[Alternatives, ...]:
        check_count(field, value, getattr(limits, limit))
        return tuple(self._word(entry, field, limits) for entry in value)

    def _word(self, entry: Any, field: str, limits: RequestLimits) -> Alternatives:
        return _alternatives(entry, field, limits)

    def to_proto(self, message: Any, name: str, value: tuple[Alternatives, ...]) -> None:
        for word in value:
            _add_all(getattr(message, name).add().alternatives, word)

    def from_json(self, name: str, value: Any) -> tuple[Alternatives, ...]:
        """Each entry is a list of ids, or a list of alternatives."""
        if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
            raise BadValue(f"has {name} that is not a list of lists of ids")
        return tuple(
            SEQUENCES.from_json(name, entry)
            if entry and isinstance(entry[0], list)
            else (TOKEN_IDS.from_json(name, entry),)
            for entry in value
        )

    def check_ids(self, value: tuple[Alternatives, ...], field: str, vocab_size: int) -> None:
        for alternatives in value:
            _check_alternatives(alternatives, field, vocab_size)


class Constraints(Words):
    """transformers' own constraints: phrases and alternatives."""

    form, hint = "constraints", "Sequence[Any]"

    def _word(self, entry: Any, field: str, limits: RequestLimits) -> Alternatives:
        kind = entry.WhichOneof("kind")
        if kind is None:
            refuse(field, "every entry must be phrasal or disjunctive")
        if kind == "phrasal":
            return (_phrase(entry.phrasal.ids, field, limits),)
        return _alternatives(entry.disjunctive, field, limits)

    def to_proto(self, message: Any, name: str, value: tuple[Alternatives, ...]) -> None:
        """Set every constraint as a disjunctive one."""
        for word in value:
            disjunctive = getattr(message, name).add().disjunctive
            disjunctive.SetInParent()
            _add_all(disjunctive.alternatives, word)


def _alternatives(word: Any, field: str, limits: RequestLimits) -> Alternatives:
    if len(word.alternatives) > limits.max_alternatives:
        refuse(field, f"every entry must have at most {limits.max_alternatives} alternatives")
    return tuple(_phrase(entry.ids, field, limits) for entry in word.alternatives)


def _check_alternatives(alternatives: Alternatives, field: str, vocab_size: int) -> None:
    """Check one word to force. No alternative may begin with another, as in transformers 4.41's DisjunctiveTrie."""
    if not alternatives or not all(alternatives):
        refuse(field, "no entry may be empty")
    for ids in alternatives:
        check_vocabulary(field, ids, vocab_size)
    for one, following in pairwise(sorted(alternatives)):
        if following[: len(one)] == one:
            refuse(field, "no alternative may be equal to, or the beginning of, another")


Biases = tuple[tuple[TokenSequence, float], ...]


class SequenceBiasKind(OptionKind):
    """A bias on the token that would complete a sequence."""

    form, hint = "sequence_bias", "Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> Biases:
        check_count(field, value, getattr(limits, limit))
        return tuple((_phrase(entry.token_ids, field, limits), as_written(entry.bias)) for entry in value)

    def to_proto(self, message: Any, name: str, value: Biases) -> None:
        for ids, bias in value:
            getattr(message, name).add(token_ids=ids, bias=bias)

    def from_json(self, name: str, value: Any) -> Biases:
        """Read JSON's form: [[[ids…], bias], …]."""
        if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
            raise BadValue(f"has {name} that is not a list of [ids, bias]")
        return tuple((TOKEN_IDS.from_json(name, ids), FLOAT32.from_json(name, bias)) for ids, bias in value)

    def check(self, value: Biases, field: str) -> None:
        if any(math.isnan(bias) or bias == math.inf for _, bias in value):
            refuse(field, "every bias must be finite or -inf")

    def check_ids(self, value: Biases, field: str, vocab_size: int) -> None:
        biased = [ids for ids, _ in value]
        SEQUENCES.check_ids(biased, field, vocab_size)
        if len(set(biased)) < len(biased):
            refuse(field, "must not hold a sequence twice")

    def to_param(self, value: Biases) -> dict[TokenSequence, float]:
        return dict(value)


class LogitBiasKind(OptionKind):
    """A bias on ids."""

    form, hint = "logit_bias", "Mapping[int, float] | Mapping[str, float]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> dict[int, float]:
        check_count(field, value, getattr(limits, limit))
        return {token_id: as_written(bias) for token_id, bias in value.items()}

    def to_proto(self, message: Any, name: str, value: Mapping[int, float]) -> None:
        getattr(message, name).update(value)

    def check(self, value: Mapping[int, float], field: str) -> None:
        if not all(map(math.isfinite, value.values())):
            refuse(field, "every bias must be finite")

    def check_ids(self, value: Mapping[int, float], field: str, vocab_size: int) -> None:
        check_vocabulary(field, value, vocab_size)

    def to_param(self, value: Mapping[int, float]) -> dict[int, float]:
        return dict(value)


class Decay(OptionKind):
    """(start_index, decay_factor)."""

    form, hint = "decay", "tuple[int, float]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[int, float]:
        return value.start_index, as_written(value.decay_factor)

    def to_proto(self, message: Any, name: str, value: tuple[int, float]) -> None:
        decay = getattr(message, name)
        decay.start_index, decay.decay_factor = value

    def from_json(self, name: str, value: Any) -> tuple[int, float]:
        if not isinstance(value, list) or len(value) != 2:
            raise BadValue(f"has {name} that is not [start_index, decay_factor]")
        return INTEGER.from_json(name, value[0]), FLOAT32.from_json(name, value[1])

    def check(self, value: tuple[int, float], field: str) -> None:
        if not _DECAY_FACTOR.allow(value[1]):
            refuse(f"{field}.decay_factor", str(_DECAY_FACTOR))


class Layers(OptionKind):
    """Layers of DoLa: "low", "high" or layer numbers."""

    form, hint = "layers", 'Literal["low", "high"] | Sequence[int]'

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> str | TokenSequence:
        layers = value.WhichOneof("layers")
        if layers is None:
            refuse(field, "preset or indices must be set")
        if layers == "preset":
            return str(value.preset)
        check_count(field, value.indices.indices, getattr(limits, limit))
        return tuple(value.indices.indices)

    def to_proto(self, message: Any, name: str, value: str | TokenSequence) -> None:
        if isinstance(value, str):
            getattr(message, name).preset = value
        else:
            getattr(message, name).indices.indices.extend(value)

    def from_json(self, name: str, value: Any) -> str | TokenSequence:
        return value if isinstance(value, str) else TOKEN_IDS.from_json(name, value)

    def check(self, value: str | TokenSequence, field: str) -> None:
        if isinstance(value, str) and value not in DOLA_PRESETS:
            refuse(field, "must be low, high or layer numbers")
        if value == ():
            refuse(field, "must hold at least one layer")


class WatermarkKind(OptionKind):
    """Green lists or SynthID. The limit bounds the width of the context."""

    form, most = "watermark", "context_width and ngram_len at most {}"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> AnyWatermark:
        present = {descriptor.name: member for descriptor, member in value.ListFields()}
        if "synthid" in present:
            if len(present) > 1:
                refuse(f"{field}.synthid", "must not be set beside the fields of green lists")
            return self._synthid(value.synthid, f"{field}.synthid", limits)
        for name in ("greenlist_ratio", "bias"):
            if name in present:
                present[name] = as_written(present[name])
        return WatermarkOptions(**present)

    @staticmethod
    def _synthid(value: Any, field: str, limits: RequestLimits) -> SynthIdOptions:
        check_count(f"{field}.keys", value.keys, limits.max_watermark_keys)
        present = {descriptor.name: member for descriptor, member in value.ListFields()}
        return SynthIdOptions(**{**present, "ngram_len": value.ngram_len, "keys": tuple(value.keys)})

    def to_proto(self, message: Any, name: str, value: AnyWatermark) -> None:
        watermark = getattr(message, name)
        target = watermark.synthid if isinstance(value, SynthIdOptions) else watermark
        for member in fields(value):
            part = getattr(value, member.name)
            if isinstance(part, tuple):
                getattr(target, member.name).extend(part)
            else:
                setattr(target, member.name, part)

    def from_json(self, name: str, value: Any) -> AnyWatermark:
        """Read either of transformers' two configurations; SynthID's has keys."""
        is_synthid = isinstance(value, dict) and "keys" in value
        parsers = _SYNTHID_JSON if is_synthid else _GREEN_LISTS_JSON
        if not isinstance(value, dict) or not set(value) <= set(parsers):
            raise BadValue(f"has {name} with fields other than {', '.join(sorted(parsers))}")
        values = {key: parsers[key](f"{name}.{key}", member) for key, member in value.items()}
        if not is_synthid:
            return WatermarkOptions(**values)
        if values.pop("debug_mode", False):
            raise BadValue(f"has {name}.debug_mode, which is for tests of transformers itself")
        return SynthIdOptions(**{"ngram_len": 0, **values})

    def check(self, value: AnyWatermark, field: str) -> None:
        if isinstance(value, SynthIdOptions):
            field = f"{field}.synthid"
        for name, bounds in (_SYNTHID_BOUNDS if isinstance(value, SynthIdOptions) else _WATERMARK_BOUNDS).items():
            if not bounds.allow(getattr(value, name)):
                refuse(f"{field}.{name}", str(bounds))
        if isinstance(value, SynthIdOptions):
            if not value.keys:
                refuse(f"{field}.keys", "must hold at least one key")
            if not all(-_KEYS_END <= key < _KEYS_END for key in value.keys):
                refuse(f"{field}.keys", "every key must be in [-2^63, 2^63 - 1]")
        elif value.seeding_scheme not in WATERMARK_SCHEMES:
            refuse(f"{field}.seeding_scheme", "must be lefthash or selfhash")

    def check_limit(self, value: AnyWatermark, field: str, limits: RequestLimits, limit: str) -> None:
        most = getattr(limits, limit)
        if isinstance(value, WatermarkOptions):
            if value.context_width > most:
                refuse(f"{field}.context_width", f"must be at most {most}")
            return
        check_count(f"{field}.synthid.keys", value.keys, limits.max_watermark_keys)
        for name, highest in (
            ("ngram_len", most),
            ("sampling_table_size", limits.max_watermark_table),
            ("context_history_size", limits.max_watermark_history),
        ):
            if getattr(value, name) > highest:
                refuse(f"{field}.synthid.{name}", f"must be at most {highest}")


class Plugins(OptionKind):
    """Names of the server owner's plugins with their parameters, in order."""

    form = "plugins"
    # penstock.Generator also takes transformers' lists of objects.
    hint = "str | Sequence[Any] | Mapping[str, Mapping[str, Any]]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[PluginChoice, ...]:
        check_count(field, value, getattr(limits, limit))
        if any(len(entry.parameters.encode()) > limits.max_plugin_bytes for entry in value):
            refuse(field, f"the parameters of an entry must have at most {limits.max_plugin_bytes} bytes")
        return tuple(PluginChoice(entry.name, entry.parameters) for entry in value)

    def to_proto(self, message: Any, name: str, value: tuple[PluginChoice, ...]) -> None:
        for choice in value:
            getattr(message, name).add(name=choice.name, parameters=choice.parameters)


_KEYS_END = 1 << 63
_GREEN_LISTS_JSON: dict[str, Callable[[str, Any], Any]] = {
    "greenlist_ratio": FLOAT32.from_json,
    "bias": FLOAT32.from_json,
    "hashing_key": INTEGER.from_json,
    "context_width": INTEGER.from_json,
    "seeding_scheme": lambda _, scheme: scheme,
}
_SYNTHID_JSON: dict[str, Callable[[str, Any], Any]] = {
    "ngram_len": INTEGER.from_json,
    "keys": lambda name, keys: _json_keys(name, keys),
    "context_history_size": INTEGER.from_json,
    "sampling_table_seed": INTEGER.from_json,
    "sampling_table_size": INTEGER.from_json,
    "skip_first_ngram_calls": FLAG.from_json,
    "debug_mode": FLAG.from_json,
}
_SYNTHID_BOUNDS = {
    "ngram_len": AT_LEAST_ONE,
    "context_history_size": SIZE,
    "sampling_table_seed": SEED_RANGE,
    "sampling_table_size": AT_LEAST_ONE,
}


def _json_keys(name: str, keys: Any) -> TokenSequence:
    """Read a list of whole numbers, of either sign."""
    if not isinstance(keys, list) or any(isinstance(key, bool) or not isinstance(key, int) for key in keys):
        raise BadValue(f"has {name} that is not a list of whole numbers")
    return tuple(keys)


_WATERMARK_BOUNDS = {
    "greenlist_ratio": _GREENLIST_RATIO,
    "bias": FINITE,
    "hashing_key": _HASHING_KEY,
    "context_width": AT_LEAST_ONE,
}

SEQUENCES, STOP_SEQUENCES, TRIE, WORDS, CONSTRAINTS = Sequences(), StopSequences(), Trie(), Words(), Constraints()
SEQUENCE_BIAS, LOGIT_BIAS, DECAY, LAYERS, WATERMARK = (
    SequenceBiasKind(),
    LogitBiasKind(),
    Decay(),
    Layers(),
    WatermarkKind(),
)
PLUGINS = Plugins()
