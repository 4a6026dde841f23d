"""YAML by libyaml, several times as fast as in Python, where PyYAML was built with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """Return the one document of a file."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


def yaml_documents(text: str) -> tuple[dict[str, Any], ...]:
    """Return the documents of a text, without empty ones."""
    return tuple(document for document in yaml.load_all(text, _LOADER) if document)
