"""tokenizer.json without its merges: what each token is.

Three quarters of a large file are merges, which only the tokenizers library needs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# A token that is called merges has a number behind its colon, and a quote inside of a text has a backslash.
_MERGES = re.compile(rb'"merges"\s*:\s*\[')
# They are the last member of the model, and the model is that of the file, as tokenizers writes it.
_END = re.compile(rb"\]\s*\}\s*\}\s*\Z")
# Bytes at the end of a file in which such an end is looked for.
_END_BYTES = 256


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Read a tokenizer.json; merges of its model are left out where that saves reading them.

    Raises OSError, and ValueError or RecursionError for what is no JSON object.
    """
    data = path.read_bytes()
    found = _before_merges(data)
    document = json.loads(data.decode()) if found is None else found
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return document


def _before_merges(data: bytes) -> dict[str, Any] | None:
    """Read what stands before the merges; None where the file has another order, or none."""
    merges = _MERGES.search(data)
    if merges is None or _END.search(data, max(merges.end(), len(data) - _END_BYTES)) is None:
        return None
    try:
        document = json.loads(data[: merges.end()].decode() + "]}}")
    except ValueError:
        return None
    match document:
        case {"added_tokens": list(), "decoder": _, "model": {"vocab": _}}:
            return dict(document)
    return None
