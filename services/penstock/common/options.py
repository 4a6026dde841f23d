"""Configuration fields: default, flag, environment variable and help text, declared once.

A service's configuration is a frozen dataclass with fields made by `option`; the command line, the PENSTOCK_*
variables and docs/reference/configuration.md are generated from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from penstock.common.environment import ENV_PREFIX
from penstock.common.units import parse_duration, parse_size

MODEL_ARGUMENT = "MODEL"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Option:
    """Settings that `option` attaches to a field."""

    help: str
    group: str
    env: str | None = None
    flag: str | None = None
    metavar: str | None = None
    secret: bool = False
    parse: Callable[[str], object] | None = None
    choices: Sequence[str] = ()
    minimum: float | None = None
    maximum: float | None = None
    hidden: bool = False


def option(
    default: Any,
    help: str,
    *,
    group: str,
    env: str | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    secret: bool = False,
    parse: Callable[[str], object] | None = None,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    hidden: bool = False,
) -> Any:
    """Make a dataclass field with its flag.

    The type decides how text is read: int, float, bool, str, Literal, tuple[str, ...] (commas), each `| None`
    ("none"). A name that ends in `_bytes` takes sizes (16MiB), one in `_seconds` durations (30s). `parse` replaces all
    this and raises ValueError. A field called `model` is the positional MODEL. `minimum` and `maximum` are inclusive.
    """
    settings = Option(help, group, env, flag, metavar, secret, parse, tuple(choices), minimum, maximum, hidden)
    return dataclasses.field(default=default, metadata={"option": settings})


@dataclasses.dataclass(frozen=True)
class BoundOption:
    """An option together with its field."""

    name: str
    type: Any
    default: Any
    settings: Option

    @property
    def flag(self) -> str:
        """Flag such as `--kv-memory`, or `MODEL` for the positional one."""
        if self.settings.flag is not None:
            return self.settings.flag
        return MODEL_ARGUMENT if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """Flag such as `--no-prefix-cache` if the default is on; else None."""
        return "--no-" + self.flag[2:] if self.is_bool and self.default else None

    @property
    def env(self) -> str:
        """Environment variable such as `PENSTOCK_KV_MEMORY`."""
        return self.settings.env or ENV_PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def inner_type(self) -> Any:
        """Type without `| None`."""
        if get_origin(self.type) in (Union, types.UnionType):
            return next(part for part in get_args(self.type) if part is not type(None))
        return self.type

    @property
    def is_bool(self) -> bool:
        return self.inner_type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.inner_type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, or () when any value of the type will do."""
        if self.settings.choices:
            return tuple(self.settings.choices)
        return tuple(map(str, get_args(self.inner_type))) if get_origin(self.inner_type) is Literal else ()

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help texts."""
        if self.settings.metavar is not None:
            return self.settings.metavar
        if self.choices:
            return "|".join(self.choices)
        if self.name.endswith("_bytes"):
            return "SIZE"
        if self.name.endswith("_seconds"):
            return "DURATION"
        return {int: "INT", float: "NUMBER"}.get(self.inner_type, "LIST" if self.is_list else "TEXT")

    def parse(self, text: str) -> object:
        """Parse `text`. Raises ValueError with the expected form."""
        if self.settings.parse is not None:
            return self.settings.parse(text)
        if type(None) in get_args(self.type) and text.strip().lower() in ("", "none"):
            return None
        if self.choices:
            return _one_of(text, self.choices)
        if self.is_list:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return _PARSERS[self._kind()](text)

    def _kind(self) -> str:
        if self.inner_type is int and self.name.endswith("_bytes"):
            return "size"
        if self.inner_type is float and self.name.endswith("_seconds"):
            return "duration"
        return str(getattr(self.inner_type, "__name__", self.inner_type))

    def check(self, value: object) -> None:
        """Check a parsed value. Raises ValueError when it is outside minimum..maximum."""
        low, high = self.settings.minimum, self.settings.maximum
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if low is not None and value < low:
                raise ValueError(f"must be at least {low:g}")
            if high is not None and value > high:
                raise ValueError(f"must be at most {high:g}")


def _one_of(text: str, choices: Iterable[str]) -> str:
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if math.isnan(value):  # NaN would pass every bound
        raise ValueError("expected a number")
    return value


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError("expected true or false")


_PARSERS: dict[str, Callable[[str], object]] = {
    "int": _integer,
    "float": _number,
    "bool": _boolean,
    "str": str,
    "size": parse_size,
    "duration": parse_duration,
}


def options_of(config: type) -> tuple[BoundOption, ...]:
    """Options of a configuration class by field name, in order of declaration: those of its bases from left to right,
    then its own."""
    return _options_of(cast(Any, config))


# Cached: every command reads every service's options, and resolving a class's types takes a millisecond.
@functools.cache
def _options_of(config: Any) -> tuple[BoundOption, ...]:
    hints, own = get_type_hints(config), {field.name: field for field in dataclasses.fields(config)}
    bases: tuple[type, ...] = config.__bases__
    inherited = [bound.name for base in bases if dataclasses.is_dataclass(base) for bound in options_of(base)]
    return tuple(
        BoundOption(name, hints[name], own[name].default, own[name].metadata["option"])
        for name in dict.fromkeys([*inherited, *own])
        if "option" in own[name].metadata
    )


def values_of(part: type, config: object) -> dict[str, Any]:
    """Return the values that `config`, which inherits from the dataclass `part`, has of its fields, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(part)}


def load(config: type[C], overrides: Mapping[str, object], environ: Mapping[str, str]) -> C:
    """Make a `config` from flags (by field name; None means absent), then variables, then defaults.

    Texts, also those in a list, are parsed; other values are kept. Raises StartupError naming the flag.
    """
    from penstock.common.errors import StartupError  # imports grpc, which --help must not wait for

    known = options_of(config)
    values: dict[str, object] = {}
    for bound in known:
        given = overrides.get(bound.name)
        if given is not None:
            values[bound.name] = _read(bound, given, bound.flag)
        elif bound.env in environ:
            values[bound.name] = _read(bound, environ[bound.env], bound.env)
    unknown = sorted(overrides.keys() - {bound.name for bound in known})
    if unknown:
        raise StartupError(f"{config.__name__} has no option {unknown[0]}", flag="--" + unknown[0].replace("_", "-"))
    return config(**values)


def _read(bound: BoundOption, given: object, source: str) -> object:
    from penstock.common.errors import StartupError

    try:
        value = bound.parse(given) if isinstance(given, str) else given
        if bound.is_list and isinstance(given, list):
            value = tuple(item for text in given for item in cast("tuple[str, ...]", bound.parse(text)))
        bound.check(value)
    except ValueError as error:
        texts = given if isinstance(given, list) else [given]
        shown = "" if bound.settings.secret else f" {' '.join(map(repr, texts))}"
        raise StartupError(f"{source}{shown}: {error}", flag=bound.flag) from error
    return value
