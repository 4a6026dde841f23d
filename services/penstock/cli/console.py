"""Output of the command line: facts to stdout, one line for an error to stderr."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

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
    """Write one plain line at once, even into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"penstock: {line}\n")
    sys.stderr.flush()


def startup_line(error: StartupError) -> str:
    """Format the error as one line that names the flag."""
    message = " ".join(error.message.split())
    return message if error.flag is None or error.flag in message else f"{message} (change {error.flag})"
