"""Installs packages into the environment that runs this: by uv, which takes a tenth of pip's time, or by pip.

    .venv/bin/python tools/install.py -e '.[dev]'

Needs the standard library alone. uv does not read pip's settings: those that say where packages come from, and which,
are handed on; where there is one that uv has no word for, and where uv fails, pip does it. torch is pip's in any case
(Makefile): uv would not take a CPU build that pip is configured to find.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UV = "uv>=0.9,<1"
# pip's settings and uv's variables. An index may hold a password: it is in no command line.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "constraint": "UV_CONSTRAINT",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
# What these ask for is asked of pip. (Further indexes are not read: what they alone have, uv does not find.)
PIPS_OWN = {"no-index", "only-binary", "no-binary", "require-hashes", "pre", "trusted-host", "proxy", "client-cert"}
_SETTING = re.compile(r"(?P<section>global|install|:env:)\.(?P<name>[\w-]+)='(?P<value>.*)'")
# Later ones win.
_SECTIONS = ("global", "install", ":env:")


def variables_of(listed: str) -> dict[str, str] | None:
    """Return uv's variables for pip's settings, as `pip config list` writes them; None where pip has to install."""
    settings = [match for match in map(_SETTING.fullmatch, listed.splitlines()) if match is not None]
    settings.sort(key=lambda match: _SECTIONS.index(match["section"]))
    found = {match["name"]: match["value"] for match in settings}
    if PIPS_OWN & found.keys():
        return None
    variables = {VARIABLES[name]: value for name, value in found.items() if name in VARIABLES}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    return variables


def install_by_uv(pip: list[str], packages: list[str], quiet: list[str], variables: Mapping[str, str]) -> bool:
    """Install uv and, with it, `packages`; False where that failed."""
    got = subprocess.run([*pip, "install", "-qq", UV], stderr=subprocess.DEVNULL)
    if got.returncode:
        return False
    # Named by its path in this pip's environment.
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", *quiet, "--python", sys.executable]
    return subprocess.run([*command, *packages], env={**os.environ, **variables}).returncode == 0


def main(packages: list[str]) -> int:
    """Install `packages`, arguments of `pip install`; the exit code."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    on_terminal = sys.stderr.isatty()
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    variables = variables_of(listed)
    if variables is not None:
        if install_by_uv(pip, packages, [] if on_terminal else ["-q"], variables):
            return 0
        print("uv could not: pip installs, which takes minutes", file=sys.stderr)
    quiet = [] if on_terminal else ["-qq"]
    return subprocess.run([*pip, "install", "--no-compile", *quiet, *packages]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
