"""Paths that callers name: below the root, links followed, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from penstock.common.errors import InvalidArgument
from penstock.generation.holder.model_load import folder_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = tmp_path / "root" / "team" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    return tmp_path / "root"


def test_folders_below_the_root_are_found(root: Path) -> None:
    model = root / "team" / "model"
    for path in ("team/model", "./team/../team/model/", str(model)):
        assert folder_below(str(root), path) == (root, model)


def test_links_within_the_root_are_followed(root: Path) -> None:
    """As in the hub's cache, whose snapshots are links to blobs."""
    (root / "blob").write_text("{}")
    (root / "team" / "model" / "tokenizer.json").symlink_to("../../blob")
    (root / "name").symlink_to("team/model")
    assert folder_below(str(root), "name")[1] == root / "team" / "model"


@pytest.mark.parametrize(
    "path",
    ["../elsewhere", "team/../../elsewhere", "/", "/etc", "no", "team/model/config.json", "a\0b", "x" * 5000],
)
def test_other_paths_are_refused(root: Path, path: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        folder_below(str(root), path)
    assert (refused.value.field, refused.value.reason) == ("start.path", "MODEL_REFUSED")


def test_the_root_itself_may_be_a_folder_and_a_missing_root_is_none(root: Path) -> None:
    assert folder_below(str(root), "") == (root, root)
    with pytest.raises(InvalidArgument):
        folder_below(str(root / "no"), "")


def test_what_is_elsewhere_is_not_told(root: Path) -> None:
    texts = set()
    for path in ("../elsewhere", "../nothing", "/srv/secret"):
        with pytest.raises(InvalidArgument) as refused:
            folder_below(str(root), path)
        # The caller's own path and the root are told, and nothing else.
        assert str(root) in refused.value.message
        texts.add(refused.value.message.replace(repr(path), "PATH"))
    assert len(texts) == 1


def test_links_that_leave_the_root_are_refused(root: Path) -> None:
    (root / "out").symlink_to("../elsewhere")
    with pytest.raises(InvalidArgument):
        folder_below(str(root), "out")
    (root / "team" / "model" / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(InvalidArgument, match="a link that leaves"):
        folder_below(str(root), "team/model")


def test_what_is_no_file_is_refused(root: Path) -> None:
    os.mkfifo(root / "team" / "model" / "tokenizer.json")
    with pytest.raises(InvalidArgument, match="no file"):
        folder_below(str(root), "team/model")
