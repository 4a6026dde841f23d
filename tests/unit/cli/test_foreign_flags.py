"""Other servers' flags and commands: each hint names flags and commands that there are."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.command_table import COMMANDS
from penstock.cli.foreign_flags import ASK_FLAGS, COMMAND_HINTS, SAME_COMMANDS, SERVE_FLAGS, ForeignFlag, flag_hint
from penstock.cli.serve.tree import tree_options
from penstock.common.options import BoundOption, options_of


def flags(options: list[BoundOption]) -> set[str]:
    """Flags and negative flags."""
    return {flag for one in options for flag in (one.flag, one.negative_flag) if flag}


TREE = flags(tree_options())
ASK = flags([*options_of(SamplingConfig), *options_of(ConnectionConfig)])


@pytest.mark.parametrize(("rows", "known"), [(SERVE_FLAGS, TREE), (ASK_FLAGS, ASK)], ids=["serve", "ask"])
def test_each_row_is_of_flags_that_we_lack_and_names_flags_that_we_have(
    rows: tuple[ForeignFlag, ...], known: set[str]
) -> None:
    named = {flag for row in rows for flag in row.ours}
    assert named <= known
    theirs = Counter(flag for row in rows for flag in row.theirs)
    assert not set(theirs) & known
    assert max(theirs.values()) == 1
    assert all(row.ours or row.note for row in rows)


def test_the_flags_that_people_bring_are_there() -> None:
    assert len(SERVE_FLAGS) > 15
    assert flag_hint("serve", "--max-model-len") == "vLLM's; here it is --max-context"
    assert flag_hint("serve", "--api-key") == ("vLLM's; here it is --auth-token-file, a file with a token in each line")
    assert flag_hint("chat", "--temp") == "llama.cpp's; here it is --temperature"
    assert flag_hint("serve", "--no-such-thing") is None
    assert flag_hint("env", "--max-model-len") is None


def test_hints_of_commands_name_commands_that_there_are() -> None:
    names = {row.name for row in COMMANDS}
    named = {word for text in COMMAND_HINTS.values() for word in re.findall(r"`penstock (\w+)", text)}
    assert named <= names
    assert not (COMMAND_HINTS.keys() | SAME_COMMANDS.keys()) & names
    assert not COMMAND_HINTS.keys() & SAME_COMMANDS.keys()
