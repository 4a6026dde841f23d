"""Known weaknesses of the packages that an installation brings: pip-audit asks the package index for them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Of this project: an index has others under these names.
_OURS = "penstock"


class NotAnswered(Exception):
    """The index has no such list, or cannot be reached; the text tells which."""


def known_weaknesses(installed: Mapping[str, str]) -> list[str]:
    """Return a line for each known weakness of packages, name -> version. Raises NotAnswered."""
    program = Path(sys.executable).with_name("pip-audit")
    if not program.is_file():
        raise NotAnswered("pip-audit is not installed")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(requirements(installed), encoding="utf-8")
        # Nothing is installed or resolved: these are the versions.
        flags = ("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off")
        done = subprocess.run([program, *flags, "-r", listed], capture_output=True, text=True, check=False)
    return read_answer(done.stdout, done.stderr)


def requirements(installed: Mapping[str, str]) -> str:
    """Return lines NAME==VERSION of others' packages. An index knows no build of a version (2.13.0+cpu)."""
    others = {name: version for name, version in sorted(installed.items()) if not name.startswith(_OURS)}
    return "".join(f"{name}=={version.partition('+')[0]}\n" for name, version in others.items())


def read_answer(answer: str, errors: str) -> list[str]:
    """Read pip-audit's JSON. Raises NotAnswered where it has none, or passed over every package."""
    try:
        found = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        raise NotAnswered((errors.strip().splitlines() or ["pip-audit says nothing"])[-1][:200]) from None
    looked = [one for one in found if "skip_reason" not in one]
    if not looked:
        raise NotAnswered("the package index has no list of weaknesses")
    return [f"{one['name']} {one['version']}: {weak['id']}" for one in looked for weak in one["vulns"]]
