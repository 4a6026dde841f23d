"""Images of the services, where a Docker engine answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROLES = ("tokenizer", "generation", "router", "gateway")


def obstacle() -> str | None:
    """Return the reason why no image can be built here; None if they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    return None if done.returncode == 0 else "no Docker engine answers"


def build(role: str, checkout: Path, version: str, commit: str) -> str:
    """Build an image and return its line for the list: tag and digest. Raises subprocess.CalledProcessError."""
    tag = f"penstock-{role}:{version}"
    arguments = [f"ROLE={role}", f"VERSION={version}", f"REVISION={commit}"]
    given = [part for argument in arguments for part in ("--build-arg", argument)]
    subprocess.run(
        ["docker", "build", "--quiet", *given, "-f", "deploy/docker/Dockerfile", "-t", tag, "."],
        cwd=checkout,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    inspected = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Id}}", tag], capture_output=True, text=True, check=True
    )
    return f"{inspected.stdout.strip()}  {tag}"
