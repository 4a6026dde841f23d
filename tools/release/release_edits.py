"""Changes that a release makes to the tree: version, end of the changelog's section, protos as the new baseline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

from tools.release.changelog import close_section
from tools.release.version_places import write_version


def make(root: Path, version: str, day: date) -> None:
    """Change the tree in `root`. Raises ValueError where there is nothing to release."""
    changes = root / "CHANGELOG.md"
    changes.write_text(close_section(changes.read_text(encoding="utf-8"), version, day), encoding="utf-8")
    write_version(root, version)
    protos = root / "protos"
    for old in (protos / "release").glob("*.binpb"):
        old.unlink()
    shutil.copyfile(protos / "penstock.binpb", protos / "release" / f"penstock-{version}.binpb")


def breaks(root: Path) -> str:
    """Return what the protos in `root` break for callers of the last release; empty where all goes on."""
    (baseline,) = (root / "protos" / "release").glob("*.binpb")
    buf = str(Path(sys.executable).with_name("buf"))
    command = [buf, "breaking", str(root / "protos"), "--against", str(baseline)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
