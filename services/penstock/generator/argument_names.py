"""Arguments of a caller in its own words: checked by their names, and errors of the services put into these."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from penstock_client._wrong_values import WrongType, WrongValue, found

from penstock.common.errors import InvalidArgument, NotFound

T = TypeVar("T")


def whole(name: str, value: Any) -> int:
    """Return a whole number. Raises InvalidArgument naming the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(name, f"must be a whole number, found {found(value)}")
    return int(value)


def ids_of(values: Any) -> list[int]:
    """Return token ids as plain numbers. Raises TypeError and ValueError for what is none; see `reading`."""
    if isinstance(values, bytes | bytearray):
        # Python has numbers in them: those of an encoding, not of tokens.
        raise TypeError
    try:
        ids = [operator.index(one.item() if hasattr(one, "item") else one) for one in values]
    except RuntimeError:
        # torch's word for a row in place of a number.
        raise ValueError from None
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
        raise ValueError
    return ids


def of_fields(kind: type[T], value: Any, name: str) -> T:
    """Return `value` as the dataclass `kind`; it may be a mapping of fields. Raises InvalidArgument naming the
    argument or the field."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, f"must be a {kind.__name__} or a mapping of its fields, found {found(value)}")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for given in value:
        if given not in known:
            raise InvalidArgument(name, f"has no field {given!r}; those of {kind.__name__}: {', '.join(known)}")
    for one in known.values():
        if one.name not in value and one.default is MISSING and one.default_factory is MISSING:
            raise InvalidArgument(one.name, "is missing")
    return kind(**value)


@contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    """Say what an argument must be where it cannot be read; errors that say so themselves pass."""
    try:
        yield
    except (WrongType, WrongValue):
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError):
        raise InvalidArgument(name, f"must be {what}") from None


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Put an error's field into the caller's words: `names` are those of the services by the field, or its begin."""

    def own(field: str | None) -> str:
        if field is not None and field in names:
            return names[field]
        return re.sub(r"^\w+", lambda match: names.get(match[0], match[0]), field or "")

    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(own(error.field), error.description, reason=error.reason) from error
    except NotFound as error:
        field = error.field
        if not field:
            raise
        message = error.message.replace(field, own(field))
        raise NotFound(message, reason=error.reason, field=own(field)) from error
