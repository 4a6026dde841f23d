"""A caller's request to load a model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class FileSize:
    """A file as its sender announces it."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A path, or the files that will come, and fields of the configuration that it changes.

    `name` may be empty. `path` None: files.
    """

    name: str
    path: str | None
    files: tuple[FileSize, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
