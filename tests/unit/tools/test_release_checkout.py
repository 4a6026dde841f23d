"""A release is made beside the tree, which changes only where it is adopted; its archives have the same bytes again."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tools.release.archive import write_archive
from tools.release.checkout import ReleaseCheckout, git, obstacle_to_final


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A Person")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "person@example.org")
    folder = tmp_path / "tree"
    folder.mkdir()
    git("init", "--quiet", "--initial-branch", "main", cwd=folder)
    (folder / "version").write_text("1\n")
    git("add", "version", cwd=folder)
    git("commit", "--quiet", "--message", "Begin", cwd=folder)
    return folder


def released(tree: Path, place: Path, is_final: bool) -> str:
    """Change the version in a checkout; return the diff."""
    with ReleaseCheckout(tree, place) as checkout:
        (checkout.folder / "version").write_text("2\n")
        diff = checkout.make_commit("Release 2")
        assert git("show", "HEAD:version", cwd=checkout.folder) == "2"
        if is_final:
            checkout.move_branch("v2", "Two")
    return diff


def test_a_dry_run_leaves_the_tree_and_its_names_as_they_were(tree: Path, tmp_path: Path) -> None:
    before = git("rev-parse", "HEAD", cwd=tree)
    diff = released(tree, tmp_path / "place", is_final=False)
    assert "-1\n+2" in diff
    assert (tree / "version").read_text() == "1\n"
    assert git("rev-parse", "HEAD", cwd=tree) == before
    assert git("for-each-ref", "--format=%(refname)", cwd=tree) == "refs/heads/main"
    assert not (tmp_path / "place").exists()
    assert git("worktree", "list", cwd=tree).count("\n") == 0


def test_a_final_one_moves_the_branch_and_tags_it(tree: Path, tmp_path: Path) -> None:
    released(tree, tmp_path / "place", is_final=True)
    assert (tree / "version").read_text() == "2\n"
    assert git("rev-list", "-1", "v2", cwd=tree) == git("rev-parse", "main", cwd=tree)
    assert git("show", "--no-patch", "--format=%s", "main", cwd=tree) == "Release 2"


def test_changes_that_are_not_committed_are_in_no_release(tree: Path, tmp_path: Path) -> None:
    (tree / "version").write_text("draft\n")
    with ReleaseCheckout(tree, tmp_path / "place") as checkout:
        assert (checkout.folder / "version").read_text() == "1\n"


def test_what_hinders_a_final_release_is_told(tree: Path) -> None:
    assert obstacle_to_final(tree, "v2") is None
    git("tag", "v2", cwd=tree)
    assert obstacle_to_final(tree, "v2") == "the tag v2 is there"
    (tree / "version").write_text("draft\n")
    assert obstacle_to_final(tree, "v3") == "the tree has changes that are not committed"
    git("checkout", "--quiet", "--detach", "HEAD", cwd=tree)
    git("checkout", "--quiet", "--", "version", cwd=tree)
    assert obstacle_to_final(tree, "v3") == "the tree is on no branch"


def test_a_failure_of_git_has_its_words(tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"git show failed: .*nowhere"):
        git("show", "nowhere", cwd=tree)


def test_an_archive_has_the_same_bytes_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("b/two", "a", "node_modules/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    os.chmod(folder / "a", 0o755)
    first, again = tmp_path / "first.tgz", tmp_path / "again.tgz"
    write_archive(first, folder, "inside", 1_000_000_000, ("node_modules",))
    os.utime(folder / "a", (5, 5))
    write_archive(again, folder, "inside", 1_000_000_000, ("node_modules",))
    assert first.read_bytes() == again.read_bytes()
    with tarfile.open(first) as archive:
        found = {entry.name: (entry.mode, entry.mtime, entry.uid) for entry in archive.getmembers()}
    assert found == {"inside/a": (0o755, 1_000_000_000, 0), "inside/b/two": (0o644, 1_000_000_000, 0)}
