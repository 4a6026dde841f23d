"""Errors in a command line: a box on a terminal, plain lines elsewhere, with ours for another server's flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from penstock.cli.foreign_flags import flag_hint

# typer's own classes: click's, or since 0.26 a copy of them. BadParameter alone is public.
UsageError: Any = typer.BadParameter.__mro__[1]
ClickException: Any = typer.BadParameter.__mro__[2]
# Raised once the help has been shown in place of an error.
_HELP_SHOWN = "NoArgsIsHelpError"


def show(error: Any, words: Sequence[str]) -> int:
    """Write a ClickException about the command line `words` to standard error, and return the exit code."""
    if type(error).__name__ == _HELP_SHOWN:
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    _add_hint(error, context, words)
    if sys.stderr is not None and sys.stderr.isatty():
        # Imported late, since it takes 0.1 s.
        from typer import rich_utils

        rich_utils.rich_format_error(error)
    elif sys.stderr is not None:
        usage = "" if context is None else _usage(context.get_usage())
        sys.stderr.write(f"{usage}penstock: {error.format_message()}\n")
    return int(error.exit_code)


def _usage(line: str) -> str:
    """Return the line of usage and the way to the help, of the command as it is typed."""
    command = line.removeprefix("Usage: ").partition(" [")[0].strip()
    return f"{line}\nTry '{command} --help' for help.\n"


def _add_hint(error: Any, context: Any, words: Sequence[str]) -> None:
    """Say what another server's flag is here. The parser's own guesses go by spelling alone."""
    flag = getattr(error, "option_name", None)
    if flag is None or context is None or not hasattr(error, "possibilities"):
        return
    # `penstock serve generation` has the flags of `penstock serve`.
    command = context.command_path.split()[1:2]
    flag = _typed(flag, words)
    hint = flag_hint(command[0], flag) if command else None
    if hint is not None:
        error.message, error.possibilities = f"no option {flag} ({hint})", None


def _typed(flag: str, words: Sequence[str]) -> str:
    """Return the flag as it stands in the command line: of -ngl the parser tells -n, of -t8 it is -t."""
    if flag.startswith("--"):
        return flag
    word = next((word for word in words if re.match("-[^-]", word) and flag[1:] in word), flag)
    return re.sub("=.*|(?<=^-.)[0-9]+$", "", word)
