"""Other servers' flags and commands: each hint names flags and commands that there are."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from penstock.cli.app import app
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.command_table import COMMANDS
from penstock.cli.foreign_flags import (
    ASK_FLAGS,
    BY_COMMAND,
    COMMAND_HINTS,
    SAME_COMMANDS,
    SERVE_FLAGS,
    ForeignFlag,
    flag_hint,
)
from penstock.cli.serve.tree import tree_options
from penstock.cli.usage_errors import ClickException, show
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
    for flag in ("--chat-template", "--mlock", "--threads-batch", "--pipeline-parallel-size", "--flash-attn"):
        assert flag_hint("serve", flag) is not None
    assert flag_hint("chat", "--temp") == "llama.cpp's; here it is --temperature"
    assert flag_hint("serve", "--no-such-thing") is None
    assert flag_hint("env", "--max-model-len") is None


def refusal(*words: str) -> Any:
    """Return the error in a command line."""
    with pytest.raises(ClickException) as raised:
        app(list(words), prog_name="penstock", standalone_mode=False)
    return raised.value


@pytest.mark.parametrize("command", BY_COMMAND)
def test_each_of_their_flags_is_told_as_it_is_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser reads -ngl as -n, -g and -l, and the hint was that of -n."""
    for row in BY_COMMAND[command]:
        for flag in row.theirs:
            words = (command, flag, "4")
            assert show(refusal(*words), words) == 2
            assert f"no option {flag} ({row.hint})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("-t8", "no option -t (llama.cpp's; here it is --threads)"),
        ("-c=4096", "no option -c (llama.cpp's; here it is --max-context)"),
        ("-nosuch", "No such option: -n"),
    ],
)
def test_a_hint_is_for_a_whole_flag(word: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(refusal("serve", word), ("serve", word))
    assert told in capsys.readouterr().err


def test_hints_of_commands_name_commands_that_there_are() -> None:
    names = {row.name for row in COMMANDS}
    named = {word for text in COMMAND_HINTS.values() for word in re.findall(r"`penstock (\w+)", text)}
    assert named <= names
    assert not (COMMAND_HINTS.keys() | SAME_COMMANDS.keys()) & names
    assert not COMMAND_HINTS.keys() & SAME_COMMANDS.keys()
