"""Files of keys: the secret of a key follows from its label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def secret_of(label: str) -> str:
    """Return the secret of a key of `write_keys`."""
    return f"sk-the-secret-of-{label}"


def bearer(label: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with that key."""
    return (("authorization", f"Bearer {secret_of(label)}"),)


def keys_text(keys: dict[str, dict[str, Any]]) -> str:
    """Return the text of a file: a table for each label, with its further fields."""
    lines = []
    for label, fields in keys.items():
        all_fields = {"label": label, "secret": secret_of(label), **fields}
        lines += ["[[keys]]", *(f"{name} = {json.dumps(value)}" for name, value in all_fields.items()), ""]
    return "\n".join(lines)


def write_keys(path: Path, **keys: dict[str, Any]) -> str:
    """Write a file as a whole; return its path."""
    new = path.with_suffix(".new")
    new.write_text(keys_text(keys))
    new.replace(path)
    return str(path)
