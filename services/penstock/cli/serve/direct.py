"""Reading of `penstock serve` by argparse: typer, with pydantic, takes 0.5 s of processor and 15 MiB of a process.

With typer a router has 45 MiB of its own in place of 30, and a tree of four 60 MiB more and two seconds of a core
before it is ready (docs/learn/decisions/light-starts.md).

It reads correct command lines only. All others, help included, are left to typer, which explains the fault. Flags mean
the same in both, since both only sort texts by field; the configuration parses them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from penstock.cli.serve.service_process import EVERYTHING, PARENT_OPTIONS, ROLES, run_role
from penstock.common.options import MODEL_ARGUMENT, BoundOption, options_of


def run_plainly(arguments: Sequence[str]) -> int | None:
    """Run `serve [SERVICE] ...` to its end; return the exit code, or None, with nothing done, for typer to read it."""
    if arguments[:1] != ["serve"] or arguments[1:2] == [EVERYTHING]:
        return None
    role, rest = ROLES.get("".join(arguments[1:2])), arguments[1:]
    if role is None:
        from penstock.cli.serve.tree import run_tree, tree_options

        given = read(rest, tree_options())
        return None if given is None else run_tree(given, **_taken_from(given))
    given = read(rest[1:], options_of(role.config_class()))
    return None if given is None else run_role(role, given, **_taken_from(given))


def _taken_from(given: dict[str, Any]) -> dict[str, int | None]:
    return {name: given.pop(name, None) for name in PARENT_OPTIONS}


class _NotPlain(Exception):
    """Raised for a command line that typer must read."""


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        """Typer explains the error to the user."""
        raise _NotPlain(message)


def read(words: Iterable[str], options: Iterable[BoundOption]) -> dict[str, Any] | None:
    """Read values by field: texts, booleans, lists of texts, and numbers from the parent.

    None when a word is neither a flag of `options` or of the parent nor a flag's value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in PARENT_OPTIONS:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    takes_model = False
    for option in options:
        if option.flag == MODEL_ARGUMENT:
            takes_model = True
            parser.add_argument("--model")
        elif option.is_bool:
            parser.add_argument(option.flag, dest=option.name, action="store_true")
            if option.negative_flag is not None:
                parser.add_argument(option.negative_flag, dest=option.name, action="store_false")
        else:
            parser.add_argument(option.flag, dest=option.name, action="append" if option.is_list else "store")
    try:
        found, others = parser.parse_known_args(list(words))
    except _NotPlain:
        return None
    given = vars(found)
    # An optional positional argument would be read only in front of all flags.
    if others and (not takes_model or len(others) > 1 or others[0].startswith("-")):
        return None
    return {"model": others[0]} | given if others else given
