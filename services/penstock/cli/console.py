"""Lines of the command line: facts to stdout, one line for an error to stderr, typed lines from stdin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.common.errors import StartupError

STARTUP_EXIT_CODE = 2


@cache
def console() -> Console:
    """Return the terminal; rich is imported late, since --version does not need it."""
    from rich.console import Console

    return Console(highlight=False)


def say(line: str = "") -> None:
    """Write one plain line at once, even into a pipe; nothing when standard output is closed."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Write one line to stderr; nothing when it is closed."""
    _write(sys.stderr, f"penstock: {line}")


def complain_or_log(line: str) -> None:
    """Write one line to stderr, as a record if this process logs JSON."""
    from penstock.common.logging import get_logger, is_json_log

    if is_json_log():
        get_logger("penstock.cli").error(line)
    else:
        complain(line)


def lines_until(read: Callable[[], str], end: str) -> Iterator[str]:
    """Yield the lines from `read` that are not empty, until the line `end`, EOFError or Ctrl-C."""
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            say()
            return
        if line == end:
            return
        if line:
            yield line


def _write(stream: TextIO | None, line: str) -> None:
    # Python has None for a stream that was closed when it started.
    if stream is not None:
        stream.write(line + "\n")
        stream.flush()


def startup_line(error: StartupError) -> str:
    """Format the error as one line that names the flag."""
    message = " ".join(error.message.split())
    return message if error.flag is None or error.flag in message else f"{message} (change {error.flag})"
