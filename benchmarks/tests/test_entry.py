"""The one entry: it lists what there is, and every benchmark has flags of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import HERE, benchmarks, main, parser_of


def test_every_module_with_flags_is_in_the_list_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed == benchmarks()
    assert not [name for name, line in listed.items() if not line.endswith(".")]
    assert {"guard", "workloads", "gateway_attack", "real_models"} <= listed.keys()


def test_what_is_no_benchmark_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["_report"]) == 2
    told = capsys.readouterr()
    assert "'_report'" in told.err
    assert "workloads" in told.out


@pytest.mark.parametrize("name", benchmarks())
def test_every_benchmark_writes_json_where_it_is_told(name: str) -> None:
    parser = parser_of(name)
    needed = [one for one in parser._actions if one.required]
    given = [part for one in needed for part in ([one.option_strings[0], "some"] if one.option_strings else ["some"])]
    options = parser.parse_args([*given, "--json", "file"])
    assert options.json == Path("file")
    assert f"python -m benchmarks {name}" in (parser.description or "")


def test_nothing_else_is_a_program() -> None:
    """But helpers of a benchmark, which it starts as processes."""
    assert not [path.name for path in HERE.glob("[a-z]*.py") if '"__main__"' in path.read_text(encoding="utf-8")]
