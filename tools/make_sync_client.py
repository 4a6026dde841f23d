"""Make the Python client's synchronous half from the asynchronous one.

Run `python tools/make_sync_client.py` after changing clients/python/penstock_client/_async.py; `--check` writes nothing
and exits 1 when the checked-in file differs from what that one gives. What the two do not share is in _channel.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[1] / "clients" / "python" / "penstock_client"
SOURCE, TARGET = CLIENT / "_async.py", CLIENT / "_sync.py"
# Whole words, in this order. One that is not found is an error: it is left over.
REPLACEMENTS = (
    (
        r"The asynchronous client\. `_sync.py` is made from this file: run tools/make_sync_client.py after a change\.",
        "The synchronous client. Generated from _async.py by tools/make_sync_client.py: do not edit.",
    ),
    (r"One event loop may use it", "Threads may share it"),
    (r"or await `result\(\)`", "or call `result()`"),
    (r"import asyncio", "import time"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"async (?=def|for|with)", ""),
    (r"await ", ""),
    (r"StopAsyncIteration", "StopIteration"),
    (r"__a(?=enter__|exit__|iter__|next__)", "__"),
    (r"Async(?=[A-Z])", ""),
)


def synchronous(source: str) -> str:
    """The synchronous text of an asynchronous module. Raises RuntimeError for a replacement that has no use."""
    for pattern, replacement in REPLACEMENTS:
        source, count = re.subn(rf"(?<!\w){pattern}", replacement, source)
        if not count:
            raise RuntimeError(f"nothing in {SOURCE.name} matches {pattern!r}: is the replacement left over?")
    # Names that are shorter now belong elsewhere in their imports and on other lines.
    sorted_imports = _ruff(["check", "--quiet", "--select", "I", "--fix-only"], source)
    return _ruff(["format", "--quiet"], sorted_imports)


def _ruff(command: list[str], text: str) -> str:
    """`text` after a ruff command, by this repository's settings. Ruff is run as a module: no PATH is needed."""
    arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write or check the file; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report a difference")
    wanted = synchronous(SOURCE.read_text())
    is_same = TARGET.is_file() and TARGET.read_text() == wanted
    if parser.parse_args().check:
        if not is_same:
            print(f"{TARGET.name} is not what {SOURCE.name} gives: run tools/make_sync_client.py", file=sys.stderr)
        return int(not is_same)
    if not is_same:
        TARGET.write_text(wanted)
    print(f"{TARGET.name} {'is up to date' if is_same else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
