"""Errors about an option's value, which say what it takes; never in Python's or protobuf's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn


class WrongType(TypeError):
    """A value has a wrong type; the text is the client's own."""


class WrongValue(ValueError):
    """A value is not allowed; the text is the client's own."""


# Errors about a value that a message cannot hold.
MISFITS = (TypeError, ValueError, AttributeError, OverflowError, KeyError, IndexError, RecursionError)
_IDS = "whole numbers from 0 to 4294967295"
# Form of the option table -> the values that it takes.
_FORMS: Mapping[str, str] = {
    "plugins": "a name, a list of names or of (name, parameters), or a mapping of names to parameters",
    "early_stopping": "True, False or 'never'",
    "schedule": "'constant', 'heuristic' or 'heuristic_transient'",
    "layers": "'low', 'high', or a list of layer numbers",
    "prompt": "a text, or a list of ids",
    "sequences": f"a list of lists of ids: {_IDS}",
    "words": f"a list of phrases, each a list of ids or of alternatives: {_IDS}",
    "constraints": f"a list of phrases, each a list of ids or of alternatives, or of transformers' constraints: {_IDS}",
    "numbers": f"a list of {_IDS}",
    "ids": f"an id, or a list of ids: {_IDS}",
    "stop_ids": f"an id, or a list of ids and of lists of ids: {_IDS}",
    "decay": "a pair (start_index, decay_factor) of a whole number and a number",
    "sequence_bias": "a mapping of tuples of ids to numbers, or a list of (ids, number)",
    "watermark": "a mapping, or transformers' WatermarkingConfig or SynthIDTextWatermarkingConfig, with their fields",
    "logit_bias": "a mapping of ids to numbers",
    "trie": f"a list of lists of ids: {_IDS}",
    "strings": "a text, or a list of texts",
    "stop_sequences": f"an id, or a list of ids and of lists of ids: {_IDS}",
}
# Names of options outside the table -> the values that they take.
_NAMES: Mapping[str, str] = {
    "choice": "a list of texts",
    "json_schema": "a JSON text, or a value for json.dumps",
    "inputs_embeds": "floating-point numbers of the shape (tokens, hidden size)",
    "config": "a penstock.v1.GenerationConfig",
    "json_object": "True or False",
    # Negative ones are OpenAI's.
    "seed": "a whole number from -2^63 to 2^63 - 1",
}
_RANGES = {
    "int32": "a whole number from -2147483648 to 2147483647",
    "int64": "a whole number from -2^63 to 2^63 - 1",
    "uint32": "a whole number from 0 to 4294967295",
    "uint64": "a whole number from 0 to 2^64 - 1",
    "float": "a number",
    "double": "a number",
    "bool": "True or False",
    "string": "a text",
    "bytes": "bytes",
}


def expected(message: Any, name: str, form: str = "plain") -> str:
    """Return a description of the values of the option `name`, a field of `message` in a form of the option table."""
    if name in _NAMES:
        return _NAMES[name]
    if form in _FORMS:
        return _FORMS[form]
    field = message.DESCRIPTOR.fields_by_name.get(name)
    return _RANGES.get(_kind(field), "another value") if field is not None else "another value"


def _kind(field: Any) -> str:
    kinds = {
        field.TYPE_INT32: "int32",
        field.TYPE_INT64: "int64",
        field.TYPE_UINT32: "uint32",
        field.TYPE_UINT64: "uint64",
        field.TYPE_FLOAT: "float",
        field.TYPE_DOUBLE: "double",
        field.TYPE_BOOL: "bool",
        field.TYPE_STRING: "string",
        field.TYPE_BYTES: "bytes",
    }
    return kinds.get(field.type, "")


def found(value: Any) -> str:
    """Describe a value: a number by itself, anything else by its type."""
    if value is None:
        return "None"
    if isinstance(value, bool | int | float) and abs(value) < 1 << 70:
        return repr(value)
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


@contextmanager
def naming(name: str, wanted: str | Callable[[], str] = "another value", value: Any = None) -> Iterator[None]:
    """Put the option's name into the error about its value, and the values that it takes in place of foreign texts."""
    try:
        yield
    except MISFITS as error:
        raise_naming(error, name, wanted, value)


def raise_naming(error: Exception, name: str, wanted: str | Callable[[], str], value: Any) -> NoReturn:
    """Raise the error of `naming` for one of MISFITS."""
    if isinstance(error, WrongType | WrongValue):
        raise type(error)(f"option {name!r}: {error}") from error
    kind = WrongType if isinstance(error, TypeError | AttributeError) else WrongValue
    text = wanted if isinstance(wanted, str) else wanted()
    raise kind(f"option {name!r}: must be {text}, found {found(value)}") from None


@contextmanager
def naming_prompt() -> Iterator[None]:
    """Describe a valid prompt in the error about ids that cannot be sent."""
    try:
        yield
    except (TypeError, ValueError, OverflowError):
        raise WrongType(f"prompt: must be a text, or a list of ids: {_IDS}") from None


def unknown(name: str, known: Any) -> WrongType:
    """Return the error for an unknown option, with the known one that was probably meant."""
    near = get_close_matches(name, list(known), 1, 0.75)
    return WrongType(f"unknown, did you mean {near[0]!r}?" if near else "unknown, see GenerationOptions")
