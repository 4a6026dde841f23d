"""A library that others could have put into the cache is never loaded, and what is built is closed to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.common.errors import StartupError
from penstock.generation.devices.native import build
from penstock.generation.devices.native.trust import digest_path

COMPILER = """#!/bin/sh
test "$1" = --version && echo "g++ 1" && exit
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo built > "$2"
    shift
done
"""


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """One that writes something at once."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def given_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("place", "change", "reason"),
    [
        (0, lambda path: path.chmod(0o757), "others may write"),
        (1, lambda path: path.chmod(0o777), "others may write"),
        (2, lambda path: path.chmod(0o775), "others may write"),
        (0, given_away, "another user"),
        (1, given_away, "another user"),
        (2, given_away, "another user"),
        (0, linked, "is a link"),
        (1, linked, "is a link"),
        (0, lambda path: path.write_text("planted"), "not what was built"),
        (0, lambda path: path.write_text(path.read_text()[:3]), "not what was built"),
        (0, lambda path: path.write_text(""), "not what was built"),
        (0, lambda path: digest_path(path).unlink(), "cannot be read"),
        (0, lambda path: digest_path(path).write_bytes(b"\xff"), "not what was built"),
    ],
)
def test_what_others_could_write_is_not_loaded(
    place: int,
    change: Callable[[Path], None],
    reason: str,
    cache: Path,
    compiler: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`place`: 0 the library, 1 its folder, 2 the cache."""
    library = build.build(cache, compiler=compiler)
    assert build.find(cache) == library
    change((library, library.parent, cache)[place])
    assert build.find(cache) is None
    assert reason in (said := capsys.readouterr().out + capsys.readouterr().err), said


def test_a_planted_library_is_built_anew_and_its_folders_are_closed(cache: Path, compiler: str) -> None:
    planted = build.library_path(cache, compiler)
    planted.parent.mkdir(parents=True)
    planted.write_text("planted")
    for path in (cache, planted.parent, planted):
        path.chmod(0o777)
    assert build.find(cache) is None
    assert build.build(cache, compiler=compiler) == planted == build.find(cache)
    assert planted.read_text() == "built\n"
    assert [path.stat().st_mode & 0o022 for path in (cache, planted.parent, planted, digest_path(planted))] == [0] * 4


@pytest.mark.parametrize("keep", [0, 3])
def test_a_library_that_was_cut_short_is_built_anew(cache: Path, compiler: str, keep: int) -> None:
    """To load it would end the process by SIGBUS, with or without a digest beside it."""
    library = build.build(cache, compiler=compiler)
    for has_digest in (True, False):
        library.write_text(library.read_text()[:keep])
        if not has_digest:
            digest_path(library).unlink()
        assert build.find(cache) is None
        assert build.build(cache, compiler=compiler) == library == build.find(cache)
        assert library.read_text() == "built\n"


def test_nothing_is_built_in_the_folder_of_another_user(cache: Path, compiler: str) -> None:
    folder = build.library_path(cache, compiler).parent
    folder.mkdir(parents=True)
    given_away(folder)
    with pytest.raises(StartupError, match="another user") as caught:
        build.build(cache, compiler=compiler)
    assert caught.value.flag == "--kernels"
