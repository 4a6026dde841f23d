"""Wheels and source distributions of penstock, penstock-client and penstock-kernels, and what an index asks of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Package -> its folder in the repository.
FOLDERS = {"penstock-client": "clients/python", "penstock": ".", "penstock-kernels": "kernels"}


def build(name: str, checkout: Path, out: Path, seconds: int) -> list[Path]:
    """Build the wheel and the source distribution of one package from a checkout.

    The environment's own hatchling builds: pip would fetch another torch for the kernels, and compile them twice.
    `seconds` since 1970 is the time of the files. Raises subprocess.CalledProcessError.
    """
    before = {*out.iterdir()}
    folder = checkout / FOLDERS[name]
    # The kernels' sources are the checkout's, too.
    packages = os.pathsep.join(str(checkout / part) for part in ("services", "clients/python"))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONPATH": packages}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(out)]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return sorted({*out.iterdir()} - before)


def check(packages: list[Path], checkout: Path) -> None:
    """Run twine's check, and that of the wheels' contents, which tell about faults.

    Raises subprocess.CalledProcessError.
    """
    subprocess.run([_program("twine"), "check", "--strict", *map(str, packages)], check=True)
    for name, folder in FOLDERS.items():
        begin = f"{name.replace('-', '_')}-"
        wheels = [str(path) for path in packages if path.name.startswith(begin) and path.suffix == ".whl"]
        settings = str(checkout / folder / "pyproject.toml")
        if wheels:
            subprocess.run([_program("check-wheel-contents"), "--config", settings, *wheels], check=True)


def _program(name: str) -> str:
    """Path of a program of this environment, which need not be on PATH."""
    return str(Path(sys.executable).with_name(name))
