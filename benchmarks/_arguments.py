"""Values of the benchmarks' flags. What is wrong is said in a line that names the flag; the exit status is 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

Parse = Callable[[str], list[str]]


def refuse(message: str) -> NoReturn:
    """End with a line on stderr and the exit status of wrong flags."""
    print(message, file=sys.stderr)
    sys.exit(2)


def at_least(smallest: int) -> Callable[[str], int]:
    """Return the type of a flag for a whole number from `smallest` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, not {value}")
        return value

    return parse


def numbers(text: str) -> list[int]:
    """Type of a flag for a list of whole numbers from 1 on, with commas."""
    return [at_least(1)(one) for one in parts(text)]


def names(known: Collection[str], what: str) -> Parse:
    """Return the type of a flag for a list of `known` words, with commas."""

    def parse(text: str) -> list[str]:
        found = parts(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{what} {name!r} is not one of {', '.join(known)}")
        return found

    return parse


def parts(text: str) -> list[str]:
    """Split a list with commas; the result is never empty."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError("the list is empty")
    return found


def be_quiet(threads: int) -> None:
    """Start this program again with the variables of so many threads, which torch reads when it is loaded."""
    from penstock.common.environment import quiet_environment

    if wanted := quiet_environment(threads):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
