"""Images of a release on a machine without an image registry, from what deploy/docker/offline.sh made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.release import images

ROOT = Path(__file__).resolve().parents[3]


def test_a_build_takes_the_bases_and_pips_arguments_of_docker_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in images.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    # Without any: the Dockerfile's own bases, from a registry.
    assert [word for word in images.command("router", "t:1", "1", "c") if "=" in word] == [
        "ROLE=router",
        "VERSION=1",
        "REVISION=c",
    ]
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert dict(re.findall(r"(\w+): \"\$\{(PENSTOCK_\w+):-", compose)).items() >= images.VARIABLES.items()
    for variable in images.VARIABLES.values():
        monkeypatch.setenv(variable, f"of {variable}")
    given = images.command("router", "t:1", "1", "c")
    for name, variable in images.VARIABLES.items():
        assert given[given.index(f"{name}=of {variable}") - 1] == "--build-arg"


def test_a_build_finds_the_wheels_that_no_commit_has(tmp_path: Path) -> None:
    tree, checkout = tmp_path / "tree", tmp_path / "checkout"
    for folder in (tree, checkout):
        (folder / images.WHEELS).mkdir(parents=True)
    (tree / images.WHEELS / "one-1-py3-none-any.whl").write_bytes(b"wheel")
    (tree / images.WHEELS / ".gitkeep").touch()
    images.take_wheels(tree, checkout)
    assert {path.name: path.read_bytes() for path in (checkout / images.WHEELS).iterdir()} == {
        "one-1-py3-none-any.whl": b"wheel"
    }
