"""`penstock serve` read without typer, which with what it imports takes 0.16 s and 11 MiB of every process.

Only what is plainly right: whatever else there is, help included, is typer's, which says what is wrong. Flags mean the
same in both, since both only sort texts by field; reading them is the configuration's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from penstock.cli.serve.service_process import EVERYTHING, PARENT_OPTIONS, ROLES, run_role
from penstock.common.options import MODEL_ARGUMENT, BoundOption, options_of

# What may follow a flag: anything but what looks like another one.
_VALUE = re.compile(r"(?!-)|-\d")
_INTEGER = re.compile(r"-?\d{1,9}")


def run_plainly(arguments: Sequence[str]) -> int | None:
    """The exit code of `serve [SERVICE] ...`, served to its end; None, and nothing done, where typer is to read it."""
    if arguments[:1] != ["serve"] or arguments[1:2] == [EVERYTHING]:
        return None
    role, rest = ROLES.get("".join(arguments[1:2])), arguments[1:]
    if role is None:
        from penstock.cli.serve.tree import run_tree, tree_options

        given = read(rest, tree_options())
        return None if given is None else run_tree(given, **_taken_from(given))
    given = read(rest[1:], options_of(role.config_class()))
    return None if given is None else run_role(role, given, **_taken_from(given))


def _taken_from(given: dict[str, object]) -> dict[str, int | None]:
    taken = {name: given.pop(name, None) for name in PARENT_OPTIONS}
    return {name: None if text is None else int(str(text)) for name, text in taken.items()}


def read(words: Iterable[str], options: Iterable[BoundOption]) -> dict[str, object] | None:
    """What was given, by field: texts, truths, lists of texts. None where a word is not plainly one of `options`, or a
    parent's, or its value."""
    known = _switches(options)
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=") if word.startswith("-") else (MODEL_ARGUMENT, "=", word)
        if flag not in known:
            return None
        name, truth, is_list = known[flag]
        if truth is None and not equals:
            value = next(rest, "-")
        if not (_VALUE.match(value) if truth is None else not equals):
            return None
        if name in PARENT_OPTIONS and not _INTEGER.fullmatch(value):
            return None
        found: object = value if truth is None else truth
        if is_list:
            found = [*_texts(given.get(name)), value]
        elif name in given:
            return None
        given[name] = found
    return given


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _switches(options: Iterable[BoundOption]) -> dict[str, tuple[str, bool | None, bool]]:
    """Flag -> field, what it means by itself (None: its value follows), and whether it may repeat."""
    known: dict[str, tuple[str, bool | None, bool]] = {
        "--" + name.replace("_", "-"): (name, None, False) for name in PARENT_OPTIONS
    }
    for option in options:
        known[option.flag] = (option.name, True if option.is_bool else None, option.is_list)
        if option.negative_flag is not None:
            known[option.negative_flag] = (option.name, False, False)
        if option.flag == MODEL_ARGUMENT:
            known["--model"] = known[MODEL_ARGUMENT]
    return known
