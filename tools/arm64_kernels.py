"""Compiles the C++ kernels for arm64 on a machine of another kind, and runs their tests with that build under QEMU.

    python tools/arm64_kernels.py [TESTS ...]

Needs Debian's g++-aarch64-linux-gnu, qemu-user-static, and apt-get with the architecture arm64
(`dpkg --add-architecture arm64 && apt-get update`). Python for arm64 comes from Debian, torch and the other packages
from pip's index: 6 GiB in all, since torch's wheel for arm64 brings CUDA's libraries. They are kept in a folder
beside Penstock's cache, penstock-arm64; remove it to fetch them anew. QEMU translates each instruction: this tells
whether the kernels are right, not how fast they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from penstock.common.environment import cache_folder
from penstock.common.errors import StartupError
from penstock.generation.devices.native import LIBRARY, build

from tools._kernel_tests import ROOT, TESTS, found_tests, lay_library

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# Python, and what its own modules are linked with.
DEBIAN = (
    *(PYTHON, f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"lib{PYTHON}-minimal"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libssl3", "libffi8", "libexpat1", "libsqlite3-0", "liblzma5"),
    *("libbz2-1.0", "libreadline8", "libuuid1", "libcrypt1", "libncursesw6", "libtinfo6", "libnsl2", "libtirpc3"),
)
# Packages that no test of the kernels imports, but those that are installed here.
LEFT_OUT = re.compile(
    r"(penstock|nvidia|triton|pip$|uv$|ruff|mypy|mkdocs|clang|buf|pymdown|types-|matplotlib|pillow)", re.I
)
# It compiles, and there is no compiler in there.
COMPILES = "test_what_was_built_is_found_without_a_compiler"
# A processor with both instruction sets, for torch's libraries, which ask Linux for it.
CPU_FILES = {
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd atomics fphp asimdhp asimdrdm asimddp i8mm bf16\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n\n",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000410fd4f0\n",
}


def unpack_python(root: Path) -> None:
    """Unpack Debian's Python for arm64 into `root`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{name}:arm64" for name in DEBIAN]
        subprocess.run(["apt-get", "download", "-q", *names], cwd=folder, check=True, stdout=sys.stderr)
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    for name, content in CPU_FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def unpack_packages(site: Path) -> None:
    """Unpack wheels for arm64 of the releases that are installed here, and torch with all that it needs.

    Raises CalledProcessError where the index has no such wheel.
    """
    platforms = ["any", "linux_aarch64", "manylinux2014_aarch64", *(f"manylinux_2_{n}_aarch64" for n in range(17, 36))]
    options = ["--only-binary=:all:", *(f"--platform={name}" for name in platforms)]
    installed = {found.name: found.version.partition("+")[0] for found in importlib.metadata.distributions()}
    wanted = [f"{name}=={version}" for name, version in sorted(installed.items()) if not LEFT_OUT.match(name)]
    with tempfile.TemporaryDirectory(dir=site.parent) as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--dest", folder, *options]
        subprocess.run([*download, f"torch=={installed['torch']}"], check=True)
        subprocess.run([*download, "--no-deps", *wanted], check=True)
        # pip would install one distribution of a namespace such as google over the other.
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def torch_version(site: Path) -> str:
    """Return what torch.__version__ is in there."""
    found = re.search(r"__version__ = '(.+)'", (site / "torch/version.py").read_text())
    if found is None:
        raise FileNotFoundError(f"{site}/torch/version.py has no version")
    return found[1]


def compile_kernels(site: Path, library: Path) -> None:
    """Cross-compile the kernels with the torch of `site`. Raises StartupError."""
    torch = site / "torch"
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed"]
    openmp = [str(path) for path in sorted((torch / "lib").glob("libgomp*.so*"))[:1]]
    build.compile_library(
        COMPILER,
        library,
        [*libraries, *openmp, f"-Wl,-rpath-link,{torch / 'lib'}"],
        machine="aarch64",
        torch_folder=torch,
        progress=lambda done, files: print(f"  {done} of {files} files", flush=True) if done % 10 == 0 else None,
    )


def main() -> int:
    """Fetch, compile and run; the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="default: the kernels' tests")
    tests = found_tests(parser.parse_args().tests)
    for program in (COMPILER, EMULATOR, "apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise StartupError(f"{program} is not there: install g++-aarch64-linux-gnu and qemu-user-static")
    home = Path(cache_folder()).with_name("penstock-arm64")
    home.mkdir(parents=True, exist_ok=True)
    root, site = home / "root", home / "site"
    for folder, unpack in ((root, unpack_python), (site, unpack_packages)):
        if not folder.exists():
            print(f"fetching {folder}", flush=True)
            with tempfile.TemporaryDirectory(dir=home) as unfinished:
                unpack(Path(unfinished) / folder.name)
                (Path(unfinished) / folder.name).rename(folder)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-arm64-") as scratch:
        library = Path(scratch) / "built" / f"{LIBRARY}.so"
        library.parent.mkdir()
        compile_kernels(site, library)
        print(f"compiled in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        sources = build.sources_digest(torch_version(site), machine="aarch64")
        lay_library(library, Path(scratch) / "penstock" / sources / f"{LIBRARY}-arm64.so")
        variables = {
            # No compiler of this machine is to be found.
            "PATH": "/nonexistent",
            "PENSTOCK_TEST_KERNELS_HOME": scratch,
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(
                map(str, (ROOT / "services", ROOT / "clients/python", ROOT, ROOT / "tests", site))
            ),
            "LD_LIBRARY_PATH": str(site / "torch/lib"),
        }
        emulated = [
            EMULATOR,
            "-cpu",
            "max",
            "-L",
            str(root),
            *(word for one in variables.items() for word in ("-E", "=".join(one))),
        ]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", f"not {COMPILES}", *tests]
        code = subprocess.run([*emulated, str(root / f"usr/bin/{PYTHON}"), *pytest], cwd=ROOT).returncode
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
