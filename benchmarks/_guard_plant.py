"""A slowdown planted in a checked-out copy of a tree, to see that `guard` finds it."""

from __future__ import annotations

import re
from pathlib import Path

_CLASS = re.compile(r"^class ModelRunner\b", re.MULTILINE)
_SLOWER = '''

def _slower(execute, share):
    """`execute` and a busy wait of a share of the time that it took."""
    from functools import wraps
    from time import perf_counter

    @wraps(execute)
    def planted(*arguments, **named):
        started = perf_counter()
        result = execute(*arguments, **named)
        until = perf_counter() + share * (perf_counter() - started)
        while perf_counter() < until:
            pass
        return result

    return planted


ModelRunner.execute = _slower(ModelRunner.execute, {share!r})
'''


def plant(folder: Path, percent: float) -> Path:
    """Make every step of the model runner take `percent` longer; the file that was changed.

    Only for a copy of a tree that is thrown away. Raises ValueError where not one file defines ModelRunner.
    """
    files = [path for path in sorted((folder / "services").rglob("*.py")) if _CLASS.search(path.read_text())]
    if len(files) != 1:
        raise ValueError(f"{len(files)} files of {folder} define ModelRunner")
    files[0].write_text(files[0].read_text() + _SLOWER.replace("{share!r}", repr(percent / 100)))
    return files[0]
