"""`penstock serve` is read without typer where it is right, and as typer reads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from penstock.cli.flags import command
from penstock.cli.serve.direct import read, run_plainly
from penstock.cli.serve.service_process import ROLES
from penstock.cli.serve.tree import tree_options
from penstock.common.options import MODEL_ARGUMENT, BoundOption, options_of

OPTIONS = {name: list(options_of(role.config_class())) for name, role in ROLES.items()} | {"tree": tree_options()}


def typers(options: list[BoundOption]) -> Callable[[list[str]], dict[str, object]]:
    """Typer's reader of these options. Making it takes longer than it takes to read."""
    found: dict[str, object] = {}
    app = typer.Typer()
    app.command()(command(options, found.update, "Serve."))
    made = typer.main.get_command(app)

    def read_by_typer(words: list[str]) -> dict[str, object]:
        found.clear()
        made.main(words, standalone_mode=False)
        return dict(found)

    return read_by_typer


def every_flag(options: list[BoundOption]) -> list[list[str]]:
    """Each option in each of its spellings, alone."""
    found = []
    for option in options:
        if option.flag == MODEL_ARGUMENT:
            found += [["some/model"], ["--model", "some/model"]]
        elif option.is_bool:
            found += [[flag] for flag in (option.flag, option.negative_flag) if flag is not None]
        else:
            found += [[option.flag, "-1"], [f"{option.flag}=a=b"], [option.flag, ""], [option.flag, "1", "m"]]
        if option.is_list:
            found.append([option.flag, "a", option.flag, "b,c"])
    return found


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_is_read_as_typer_reads_it(name: str) -> None:
    options, read_by_typer = OPTIONS[name], typers(OPTIONS[name])
    has_model = any(option.flag == MODEL_ARGUMENT for option in options)
    alone = [words for words in every_flag(options) if has_model or "m" not in words][::7]
    assert [read(words, options) for words in alone] == [read_by_typer(words) for words in alone]
    together = [word for option in options for word in every_flag([option])[0]]
    assert read(together, options) == read_by_typer(together)
    twice = [*together, *(["--model", "n"] if has_model else []), "--port", "1", "--port", "2"]
    assert read(twice, options) == read_by_typer(twice)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["--kv-mem", "1GiB"],
        ["--kv-memory"],
        ["--kv-memory", "--port", "1"],
        ["--prefix-cache=yes"],
        ["m", "n"],
        ["--", "m"],
        ["--report-fd", "x"],
        ["-"],
    ],
)
def test_what_is_not_plain_is_left_to_typer(words: list[str]) -> None:
    assert read(words, OPTIONS["generation"]) is None


def test_other_commands_are_left_to_typer() -> None:
    for words in ([], ["chat"], ["serve", "--help"], ["serve", "router", "--help"], ["serve", "all"]):
        assert run_plainly(words) is None


def test_what_the_parent_says_is_read_beside_the_options() -> None:
    given = read(["--report-fd", "5", "--parent-pid=77", "--gate-fd", "-1", "--port", "0"], OPTIONS["router"])
    assert given == {"report_fd": 5, "parent_pid": 77, "gate_fd": -1, "port": "0"}


def test_a_service_that_is_started_plainly_imports_no_typer() -> None:
    code = "\n".join(
        [
            "import sys",
            "sys.argv = ['penstock', 'serve', 'router', '--port', 'abc']",
            "from penstock.cli.main import main",
            "try: main()",
            "except SystemExit as ended: print(ended.code)",
            "print([name for name in ('typer', 'pydantic', 'torch') if name in sys.modules])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2", "[]"]
    assert "--port" in done.stderr


@pytest.mark.parametrize("words", [["/no/such"], ["generation", "--model", "/no/such"], ["tokenizer", "/no/such"]])
def test_a_missing_folder_is_told_before_anything_heavy_is_imported(words: list[str]) -> None:
    code = "\n".join(
        [
            "import sys",
            f"sys.argv = {['penstock', 'serve', *words]!r}",
            "from penstock.cli.main import main",
            "try: main()",
            "except SystemExit as ended: print(ended.code)",
            "print([name for name in ('torch', 'tokenizers') if name in sys.modules])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2", "[]"]
    assert "MODEL /no/such: no such folder" in done.stderr
