"""File of models (`--models`): what a router serves beside each other, each model with a tokenizer of its own.

TOML, with a table for each model:

    default = "chat"                   # name for requests without `model`

    [[models]]
    name = "smollm2-v1"                # as its backends are started: --served-model-name
    aliases = ["chat"]                 # a name that several models have is shared between them by weight
    weight = 9
    tokenizer = ["10.0.0.1:50051"]
    backends = ["10.0.0.2:50052"]

A model with `path` in place of `backends` is loaded on demand into one of `slots`: services without a model.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError
from penstock.common.units import parse_size
from penstock.router.backend_targets import check_target
from penstock.v1 import model_pb2

FLAG = "--models"
_MOST_WEIGHT = 1e9
# As LoadModelStart.name has it: names are labels of metrics, too.
_NAME = re.compile(r"[A-Za-z0-9./:@_-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of the file."""

    # Name that its backends serve.
    name: str
    # host:port, as --tokenizer and --backend.
    tokenizer: tuple[str, ...]
    backends: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    # Share of the requests for a name that it has with others.
    weight: float = 1.0
    # Folder below the slots' --model-root. Empty: it has backends of its own.
    path: str = ""
    # Memory that it takes in a slot, of the file's own `memory`.
    memory: int = 0
    # Fields of LoadModelOptions.
    options: Mapping[str, Any] | None = None

    @property
    def is_on_demand(self) -> bool:
        """True when it is loaded because a request asks for it."""
        return bool(self.path)


@dataclass(frozen=True, kw_only=True)
class ModelsFile:
    """A whole file that was checked."""

    models: tuple[ModelEntry, ...]
    default: str = ""
    # host:port of services without a model.
    slots: tuple[str, ...] = ()
    # Bytes that the models in slots may take together; 0: as many models as slots.
    memory: int = 0


def read_models(path: str, max_models: int, *, is_local: bool = False) -> ModelsFile:
    """Read and check a file; `max_models` bounds its models. Raises StartupError naming --models and the key.

    `is_local`: the file of `penstock serve`, which has folders and no addresses.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        # Of its characters, of TOML, or of a number with thousands of digits.
        raise _wrong(path, f"is not TOML: {error}") from error
    except RecursionError as error:
        raise _wrong(path, "is nested too deep") from error
    return _checked(_TableReader(path, tables), max_models, is_local=is_local)


def _checked(top: _TableReader, max_models: int, *, is_local: bool) -> ModelsFile:
    slots = top.targets("slots")
    tables = top.take("models", list) or []
    if not tables:
        raise top.wrong("models", "there must be at least one [[models]]")
    if len(tables) > max_models:
        raise top.wrong("models", f"are {len(tables)}, and --max-models allows {max_models}")
    readers = [_TableReader(top.path, table, f"models[{number}].") for number, table in enumerate(tables)]
    models = tuple(_entry(reader, has_slots=bool(slots), is_local=is_local) for reader in readers)
    found = ModelsFile(models=models, default=top.take("default", str) or "", slots=slots, memory=top.size("memory"))
    top.require_end()
    _check_names(top, found)
    _check_targets(top, found)
    return found


def _entry(reader: _TableReader, *, has_slots: bool, is_local: bool) -> ModelEntry:
    entry = ModelEntry(
        name=reader.name("name"),
        tokenizer=reader.targets("tokenizer"),
        backends=reader.targets("backends", has_schemes=True),
        aliases=reader.names("aliases"),
        weight=reader.weight("weight"),
        path=reader.take("path", str) or "",
        memory=reader.size("memory"),
        options=reader.options("options"),
    )
    reader.require_end()
    if is_local:
        if entry.tokenizer or entry.backends or not entry.path:
            raise reader.wrong("path", "is needed here, and `tokenizer` and `backends` are not: they are started")
        return entry
    if not entry.tokenizer:
        raise reader.wrong("tokenizer", "needs at least one host:port")
    if bool(entry.backends) == entry.is_on_demand:
        raise reader.wrong("backends", "or `path` must be set, and not both")
    if entry.is_on_demand and not has_slots:
        raise reader.wrong("path", "needs `slots` at the top of the file")
    if not entry.is_on_demand and entry.options:
        raise reader.wrong("options", "are for a model with `path`")
    return entry


def _check_names(top: _TableReader, found: ModelsFile) -> None:
    names = [model.name for model in found.models]
    aliases = {alias for model in found.models for alias in model.aliases}
    if twice := {name for name in names if names.count(name) > 1}:
        raise top.wrong("models", f"has the name {min(twice)} twice")
    if both := aliases & set(names):
        raise top.wrong("models", f"has {min(both)} as a name and as an alias")
    if big := [model.name for model in found.models if found.memory and model.memory > found.memory]:
        raise top.wrong("memory", f"is less than {big[0]} takes alone")
    for alias in sorted(aliases):
        if not any(model.weight for model in found.models if alias in model.aliases):
            raise top.wrong("models", f"no model with the alias {alias} has a weight above 0")
    if found.default and found.default not in aliases | set(names):
        raise top.wrong("default", f"is {found.default}, which no model has as a name or an alias")


def _check_targets(top: _TableReader, found: ModelsFile) -> None:
    targets = [*found.slots, *(target for model in found.models for target in model.backends)]
    if twice := {target for target in targets if targets.count(target) > 1}:
        raise top.wrong("models", f"has {min(twice)} twice: a backend belongs to one model, or is a slot")


class _TableReader:
    """Reads one table key by key. Raises StartupError naming the key."""

    def __init__(self, path: str, table: Any, where: str = "") -> None:
        self.path = path
        self._where = where
        if not isinstance(table, dict):
            raise _wrong(path, f"{where.removesuffix('.')}: must be a table")
        self._left = dict(table)

    def wrong(self, key: str, why: str) -> StartupError:
        """Make the error of a key."""
        return _wrong(self.path, f"{self._where}{key}: {why}")

    def take(self, key: str, kind: type) -> Any:
        """Take a value out of the table; None where there is none."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, f"must be {_KINDS[kind]}")
        return value

    def require_end(self) -> None:
        """Refuse keys that nobody took."""
        for key in self._left:
            known = "default, slots, memory, models" if not self._where else ", ".join(_KEYS)
            raise self.wrong(key, f"is unknown; there are: {known}")

    def name(self, key: str) -> str:
        """Take a name."""
        return self._name(key, self.take(key, str) or "")

    def names(self, key: str) -> tuple[str, ...]:
        """Take a list of names, each once."""
        return tuple(dict.fromkeys(self._name(key, name) for name in self.take(key, list) or ()))

    def targets(self, key: str, *, has_schemes: bool = False) -> tuple[str, ...]:
        """Take a list of host:port, or of all that --backend takes."""
        targets = tuple(self.take(key, list) or ())
        for target in targets:
            if not isinstance(target, str):
                raise self.wrong(key, "must be a list of host:port")
            try:
                check_target(target, FLAG, has_schemes=has_schemes)
            except StartupError:
                raise self.wrong(key, f"{target!r} is not host:port") from None
        return targets

    def weight(self, key: str) -> float:
        """Take a weight."""
        value = self._left.pop(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_WEIGHT:
            raise self.wrong(key, f"must be a number from 0 to {_MOST_WEIGHT:g}")
        return float(value)

    def options(self, key: str) -> Mapping[str, Any] | None:
        """Take a table of LoadModel's options."""
        value: dict[str, Any] | None = self.take(key, dict)
        try:
            model_pb2.LoadModelOptions(**(value or {}))
        except (ValueError, TypeError) as error:
            raise self.wrong(key, f"must be those of LoadModel: {error}") from error
        return value

    def size(self, key: str) -> int:
        """Take a size: bytes, or a text such as 2GiB."""
        value = self._left.pop(key, 0)
        try:
            size = parse_size(value) if isinstance(value, str) else int(value)
        except (ValueError, TypeError, OverflowError):
            size = -1
        if size < 0:
            raise self.wrong(key, "must be a size such as 2GiB")
        return size

    def _name(self, key: str, name: object) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self.wrong(key, "must be 1 to 128 letters, digits and ./:@_-")
        return name


_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "a table"}
_KEYS = tuple(field.name for field in fields(ModelEntry))


def _wrong(path: str, why: str) -> StartupError:
    return StartupError(f"{FLAG} {path}: {why}", flag=FLAG)
