"""The protos and the packages for other languages, by the checkout's own tools/make_sdks.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.release.archive import write_archive

PROTOS = "protos"
NAMES = (PROTOS, "go", "typescript", "java", "cpp", "ruby")
# Made anew by who builds the package.
_LEFT_OUT = ("node_modules", "package-lock.json")


class NotMadeHere(Exception):
    """A package that needs a program which this machine lacks; the text names it."""


def build(name: str, checkout: Path, out: Path, version: str, seconds: int) -> list[Path]:
    """Make a package and return its files in `out`. Raises NotMadeHere, or RuntimeError with the compiler's words."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(checkout / "tools" / "make_sdks.py"), "--out", folder, name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip()
            raise NotMadeHere(reason) if reason.startswith(f"{name}: ") else RuntimeError(reason)
        return list(_collected(name, Path(folder) / name, out, version, seconds))


def _collected(name: str, made: Path, out: Path, version: str, seconds: int) -> Iterator[Path]:
    if name == PROTOS:
        for path in sorted(made.iterdir()):
            yield Path(shutil.copyfile(path, out / path.name))
        return
    if name == "typescript":
        # The form that npm installs and publishes.
        packed = subprocess.run(
            ["npm", "pack", "--silent", "--pack-destination", str(out)],
            cwd=made,
            capture_output=True,
            text=True,
            check=True,
        )
        yield out / packed.stdout.strip().splitlines()[-1]
        return
    if name == "ruby" and shutil.which("gem") is not None:
        yield _build_gem(made, out / f"penstock-client-{version}.gem", seconds)
    inside = f"penstock-client-{name}-{version}"
    write_archive(out / f"{inside}.tar.gz", made, inside, seconds, _LEFT_OUT)
    yield out / f"{inside}.tar.gz"


def _build_gem(folder: Path, gem: Path, seconds: int) -> Path:
    """Build what `gem install` and `gem push` take. Its times are `seconds`: the same sources make the same bytes."""
    subprocess.run(
        ["gem", "build", "--silent", "--output", str(gem), "penstock-client.gemspec"],
        cwd=folder,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(seconds)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return gem
