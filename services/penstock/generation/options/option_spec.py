"""A row of the table of options, and sets of options: plain data that stores only the options that are set."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from penstock.generation.core.decoding_mode import Scope
from penstock.generation.options.kinds import Bounds, OptionKind

_ROW = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Everything about one option. `name` is that of its proto field, `section` its message's in a request."""

    name: str
    section: str
    kind: OptionKind
    # One line for people: the reference page, --help, the clients' keywords.
    doc: str
    bounds: Bounds | None = None
    # Field of RequestLimits that bounds its size or its number of entries.
    limit: str = ""
    # Requests in which it has an effect; empty: every one.
    scopes: tuple[Scope, ...] = ()
    # Values that ask for nothing: they get no warning where the option has no effect.
    silent: tuple[object, ...] = ()
    # Options of its section that it needs: without any of them it does nothing, and setting it gets a warning.
    needs: tuple[str, ...] = ()
    # Mode that a value asks for, beside the others' own options: `num_beams` asks for beam search.
    chooses: Scope | None = None
    # Field of SamplingParams that takes the value as it is; None: `resolve` works on it.
    param: str | None = None
    # Value when neither the request nor the model's file sets it; in words if it is not a constant.
    default: object = None
    # True: generation_config.json may set it. The file is a GenerationConfig, so it has no other sections.
    in_file: bool = True
    # True: only the router accepts it.
    router_only: bool = False
    # Its oneof in the proto: warnings and keywords of clients use that name.
    oneof: str = ""
    # Group of its own flag on the command line; empty: `--option` sets it.
    flags: str = ""
    # For the reference page: other allowed values or answers, and differences from transformers.
    allowed: str = ""
    differs: str = ""

    def __post_init__(self) -> None:
        if self.in_file and self.section != "config":
            raise ValueError(f"{self.path}: generation_config.json sets options of config only")

    @property
    def path(self) -> str:
        """Path of the field, as errors name it."""
        return f"{self.section}.{self.name}"

    @property
    def is_sampling_only(self) -> bool:
        """True for an option that shapes a distribution to draw from."""
        return Scope.SAMPLING in self.scopes

    @property
    def effect(self) -> str:
        """Requests in which it has an effect, in words; empty: every one."""
        return ", ".join(scope.words for scope in self.scopes)

    def asks(self, value: object) -> bool:
        """True for a value that asks for something."""
        return bool(value) and value not in self.silent


def row(kind: OptionKind, doc: str, *, unset: Any = None, **columns: Any) -> Any:
    """Return a field of a set of options with its row of the table (see OptionSpec). `unset` is the field's value while
    it is not set."""
    return field(default=unset, metadata={_ROW: {"kind": kind, "doc": doc, **columns}})


class OptionSet:
    """Options by name. Only those that are set are stored: an empty set costs next to nothing.

    Subclasses are frozen dataclasses of `row`s; an unset option reads as its class attribute.
    """

    section: ClassVar[str]
    specs: ClassVar[Mapping[str, OptionSpec]]

    def __init__(self, **values: Any) -> None:
        """Take options by name. None is unset, and so is the value of an unset one: `dataclasses.replace` passes it.

        Raises KeyError for an unknown name.
        """
        unknown = values.keys() - self.specs.keys()
        if unknown:
            raise KeyError(*unknown)
        self.__dict__.update(
            (name, value) for name, value in values.items() if value is not None and value != getattr(type(self), name)
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return options of known names, none of them None; `values` are kept, not copied."""
        options = cls.__new__(cls)
        object.__setattr__(options, "__dict__", values)
        return options

    def items(self) -> ItemsView[str, Any]:
        """Return the set options: name, value."""
        return self.__dict__.items()

    def over(self, fallback: Self) -> Self:
        """Return these options, and `fallback`'s where these are unset."""
        if not fallback.__dict__:
            return self
        return self.of({**fallback.__dict__, **self.__dict__})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(frozenset(self.__dict__.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def specs_of(options: Any, section: str) -> dict[str, OptionSpec]:
    """Return the rows of a set of options, in the order of their fields."""
    common = {"section": section} if section == "config" else {"section": section, "in_file": False}
    return {one.name: OptionSpec(name=one.name, **common, **one.metadata[_ROW]) for one in fields(options)}
