"""Fresh environments with packages of a release, as a stranger makes them, by uv."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.install import variables_of

# Variables that would let an environment see the repository, another environment, or kernels that were compiled here.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XDG_CACHE_HOME")


class FreshEnvironment:
    """A virtual environment in `folder`, of the Python that runs this: packages come from `artefacts` and an index."""

    def __init__(self, folder: Path, artefacts: Path) -> None:
        self.folder = folder
        self._artefacts = artefacts
        self._run_uv("venv", "--quiet", "--python", sys.executable, str(folder))

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.program("python")

    def program(self, name: str) -> Path:
        """Return the path of a program in it."""
        return self.folder / "bin" / name

    def install(self, *requirements: str) -> None:
        """Install packages. Raises RuntimeError with uv's words."""
        self._run_uv("pip", "install", "--quiet", "--python", str(self.python), *requirements)

    def resolve(self, requirement: str, *flags: str) -> dict[str, str]:
        """Return what an installation would bring: name -> version. Raises RuntimeError with uv's words."""
        command = ("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", str(self.python))
        return _versions(self._run_uv(*command, *flags, "-", given=requirement))

    def installed(self) -> dict[str, str]:
        """Return the packages in it: name -> version."""
        return _versions(self._run_uv("pip", "list", "--format", "freeze", "--python", str(self.python)))

    def build_wheel(self, source: Path, out: Path) -> Path:
        """Build the wheel of a source distribution and return it. Raises RuntimeError with uv's words."""
        self._run_uv("build", "--wheel", "--quiet", "--python", str(self.python), "--out-dir", str(out), str(source))
        (wheel,) = out.glob("*.whl")
        return wheel

    @property
    def variables(self) -> dict[str, str]:
        """Variables for a program of the environment: nothing of the repository is in reach, and its cache is empty."""
        return {**_stranger_variables(), "XDG_CACHE_HOME": str(self.folder / "cache")}

    def run(self, *command: str, folder: Path | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, in its own folder or another."""
        return subprocess.run(
            [str(self.program(command[0])), *command[1:]],
            cwd=folder or self.folder,
            env=self.variables,
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    def _run_uv(self, *arguments: str, given: str = "") -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("uv")), *arguments],
            env={**_stranger_variables(), **_index_settings(self._artefacts)},
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"uv {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


def _versions(listed: str) -> dict[str, str]:
    """Read lines NAME==VERSION; others are left out."""
    lines = (line.split(";")[0].split() for line in listed.splitlines() if "==" in line)
    return {name: version for name, _, version in (words[0].partition("==") for words in lines)}


def _stranger_variables() -> dict[str, str]:
    """Return this process's variables but those that lead to the repository or are Penstock's."""
    return {name: value for name, value in os.environ.items() if name not in _OURS and not name.startswith("PENSTOCK_")}


def _index_settings(artefacts: Path) -> dict[str, str]:
    """Return uv's variables: pip's settings where uv has a word for them, and the folder of artefacts."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    variables = variables_of(listed.stdout) or {}
    places = [str(artefacts), *filter(None, [variables.get("UV_FIND_LINKS")])]
    return {**variables, "UV_FIND_LINKS": ",".join(places)}
