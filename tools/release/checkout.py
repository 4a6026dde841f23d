"""A checkout of its own in which a release is made, so that artefacts are a commit's and nothing else's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType


def git(*arguments: str, cwd: Path) -> str:
    """Run git and return its output. Raises RuntimeError with git's words."""
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


class ReleaseCheckout:
    """A worktree at the tree's commit, on no branch, with the commit of the release once it is made.

    The tree itself changes in `move_branch` alone. Without it a commit is left behind that no name leads to.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self._tree = tree
        self.base = git("rev-parse", "HEAD", cwd=tree)

    def __enter__(self) -> ReleaseCheckout:
        git("worktree", "add", "--quiet", "--detach", str(self.folder), self.base, cwd=self._tree)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        git("worktree", "remove", "--force", str(self.folder), cwd=self._tree)

    @property
    def commit(self) -> str:
        """The commit that is checked out."""
        return git("rev-parse", "HEAD", cwd=self.folder)

    @property
    def commit_seconds(self) -> int:
        """Time of the commit that the release is made of, in seconds since 1970: that of files in archives."""
        return int(git("show", "--no-patch", "--format=%ct", self.base, cwd=self._tree))

    def make_commit(self, message: str) -> str:
        """Commit all changes, and return them as a diff."""
        git("add", "--all", cwd=self.folder)
        git("commit", "--quiet", "--no-verify", "--message", message, cwd=self.folder)
        return git("diff", self.base, "HEAD", cwd=self.folder)

    def move_branch(self, tag: str, message: str) -> None:
        """Move the tree's branch on to the commit of the release, and tag it. Raises RuntimeError."""
        git("merge", "--quiet", "--ff-only", self.commit, cwd=self._tree)
        git("tag", "--annotate", "--message", message, tag, cwd=self._tree)


def obstacle_to_final(tree: Path, tag: str) -> str | None:
    """Return the reason why a release cannot be committed and tagged here; None if it can."""
    if git("status", "--porcelain", cwd=tree):
        return "the tree has changes that are not committed"
    if not git("branch", "--show-current", cwd=tree):
        return "the tree is on no branch"
    if git("tag", "--list", tag, cwd=tree):
        return f"the tag {tag} is there"
    return None
