"""Sources that are replaced or removed while they are compiled: no library has the name of what was there before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.common.errors import StartupError
from penstock.generation.devices.native import build

# Compiles nothing, and runs a command that changes the sources.
COMPILER = """#!/bin/sh
test "$1" = --version && echo "g++ 1" && exit
{change}
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo built > "$2"
    shift
done
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sources of the test's own, which no earlier test has read."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "ops_one.cpp").write_text("int one;")
    (folder / "two.cpp").write_text("int two;")
    monkeypatch.setattr(build, "SOURCES", folder)
    build._digest_of_sources.cache_clear()
    yield folder
    build._digest_of_sources.cache_clear()


def compiler(folder: Path, change: str) -> str:
    path = folder / "compiler"
    path.write_text(COMPILER.format(change=change))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("change", ["rm -f {0}/*", "echo 'int three;' > {0}/two.cpp", "touch {0}/new.h"])
def test_a_library_of_changed_sources_is_not_kept(tmp_path: Path, sources: Path, change: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(StartupError, match="changed while they were compiled: start again"):
        build.build(cache, compiler=compiler(tmp_path, change.format(sources)))
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_library_of_the_same_sources_is(tmp_path: Path, sources: Path) -> None:
    built = build.build(tmp_path / "cache", compiler=compiler(tmp_path, f"touch {sources}/two.cpp"))
    assert built.read_text() == "built\n"
