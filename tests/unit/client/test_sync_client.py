"""The Python client's synchronous half is what the asynchronous one gives."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import penstock_client
import pytest

from tools.make_sync_client import PAIRS, main, require_use, synchronous

SOURCE, TARGET = PAIRS[0]


def test_the_checked_in_file_is_made_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_sync_client.py", "--check"])
    assert main() == 0


def test_a_change_on_one_side_only_is_seen() -> None:
    changed = SOURCE.read_text().replace("request's deadline", "deadline of the request")
    assert changed != SOURCE.read_text()
    assert synchronous(changed) != TARGET.read_text()


def test_a_replacement_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="left over"):
        require_use(["async def f() -> None: ...\n"])


@pytest.mark.parametrize("made", [target for _, target in PAIRS], ids=lambda path: path.name)
def test_nothing_asynchronous_is_left(made: Path) -> None:
    assert not re.findall(r"async(?!\.py)|await|Async|__a(?:enter|exit|iter|next)__", made.read_text())


@pytest.mark.parametrize(
    ("one", "other"),
    [("Client", "AsyncClient"), ("Stream", "AsyncStream"), ("JobsClient", "AsyncJobsClient")],
)
def test_both_halves_have_the_same_methods_with_the_same_parameters(one: str, other: str) -> None:
    def methods(name: str) -> dict[str, list[str]]:
        kind = getattr(penstock_client, name)
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(function).parameters) for name, function in found if name[0] != "_"}

    assert methods(one) == methods(other)
