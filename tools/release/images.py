"""Images of the services, where a Docker engine answers.

Bases and pip's arguments come from the variables that docker-compose reads, and wheels from the tree: what
deploy/docker/offline.sh made serves a release without an image registry, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROLES = ("tokenizer", "generation", "router", "gateway")
# Build argument -> variable of docker-compose.yml.
VARIABLES = {"BASE": "PENSTOCK_BASE", "BUILD_BASE": "PENSTOCK_BUILD_BASE", "PIP_ARGS": "PENSTOCK_PIP_ARGS"}
WHEELS = "deploy/docker/wheels"


def obstacle() -> str | None:
    """Return the reason why no image can be built here; None if they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    return None if done.returncode == 0 else "no Docker engine answers"


def build(role: str, checkout: Path, version: str, commit: str) -> str:
    """Build an image and return its line for the list: tag and digest. Raises subprocess.CalledProcessError."""
    tag = f"penstock-{role}:{version}"
    subprocess.run(command(role, tag, version, commit), cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    inspected = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Id}}", tag], capture_output=True, text=True, check=True
    )
    return f"{inspected.stdout.strip()}  {tag}"


def command(role: str, tag: str, version: str, commit: str) -> list[str]:
    """Return the command that builds an image, in the checkout's folder."""
    arguments = {"ROLE": role, "VERSION": version, "REVISION": commit}
    arguments |= {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
    given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    return ["docker", "build", "--quiet", *given, "-f", "deploy/docker/Dockerfile", "-t", tag, "."]


def take_wheels(tree: Path, checkout: Path) -> None:
    """Copy the wheels of packages that the tree has, and no commit: a build without an index needs them."""
    for wheel in (tree / WHEELS).glob("*.whl"):
        shutil.copyfile(wheel, checkout / WHEELS / wheel.name)
