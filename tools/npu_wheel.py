"""Run models on fake tensors through a real wheel of torch-npu, on a machine without an NPU and without CANN:

python tools/npu_wheel.py                # the wheel of the installed torch's version, from the package index
python tools/npu_wheel.py WHEEL          # this one, of the installed torch's version

The wheel is unpacked below build/npu, not installed. CANN's libraries are compiled there as stubs: every function that
the wheel's own libraries ask for returns 0, and one device is found. So torch-npu registers its operators and their
meta functions as on a device, and tools/_npu_trace.py runs whole models through these. No number is computed. Needs gcc
and binutils. Exit code 0: every call fits.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "npu"
# The library that has all of CANN's functions here; the wheel also looks some up in it by name.
_RUNTIME = "libascendcl.so"
# Functions with results that are used, or that are looked up by name.
_OWN = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
    "aclrtSetOpWaitTimeout": "int aclrtSetOpWaitTimeout(unsigned seconds) { return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B4"; }',
}


def downloaded() -> Path:
    """Return the wheel of torch's version, which comes from the package index unless it is there."""
    version = torch.__version__.partition("+")[0]
    if found := sorted(PLACE.glob(f"torch_npu-{version}-*.whl")):
        return found[-1]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(PLACE)]
    subprocess.run([*command, f"torch-npu=={version}"], check=True)
    return sorted(PLACE.glob(f"torch_npu-{version}-*.whl"))[-1]


def symbols(library: Path, which: str) -> set[str]:
    """Return the names of the dynamic symbols that a library has ("--defined-only") or asks for
    ("--undefined-only"), without those of a version."""
    lines = subprocess.run(["nm", "-D", which, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in lines.splitlines() if "@" not in line}


def needed(library: Path) -> set[str]:
    """Return the names of the libraries that a library is linked with."""
    lines = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split("[")[1].split("]")[0] for line in lines.splitlines() if "(NEEDED)" in line}


def is_there(name: str) -> bool:
    """True when the system has a library of this name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def make_stubs(package: Path, place: Path) -> int:
    """Compile CANN's libraries, as the libraries below `package` ask for them, into `place`. Return the number of
    functions."""
    place.mkdir(parents=True)
    own = sorted(package.rglob("*.so"))
    torch_libraries = sorted((Path(torch.__file__).parent / "lib").glob("*.so*"))
    had = set[str]().union(*(symbols(one, "--defined-only") for one in (*own, *torch_libraries)))
    wanted = set[str]().union(*(symbols(one, "--undefined-only") for one in own)) - had
    process = ctypes.CDLL(None)
    # C's names. The few of C++ are of libraries that are opened by name when they are used.
    asked = {name for name in wanted if not name.startswith("_") and not hasattr(process, name)} - _OWN.keys()
    functions = [*_OWN.values(), *(f"int {name}(void) {{ return 0; }}" for name in sorted(asked))]
    source = place / "cann.c"
    source.write_text("\n".join(functions) + "\n")
    (place / "empty.c").write_text("typedef int empty;\n")
    known = {one.name for one in (*own, *torch_libraries)}
    linked = set[str]().union(*(needed(one) for one in own)) - known
    for name in sorted(one for one in linked if not is_there(one)):
        file = source if name == _RUNTIME else place / "empty.c"
        target = ["-o", str(place / name), f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", "-w", "-shared", "-fPIC", *target, str(file)], check=True)
    return len(functions)


def main() -> int:
    """Unpack, compile, trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?")
    options = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    wheel = options.wheel or downloaded()
    unpacked = PLACE / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    stubs = unpacked / "stubs"
    print(f"{make_stubs(unpacked / 'torch_npu', stubs)} functions of CANN are stubs", flush=True)
    code = subprocess.call([sys.executable, str(ROOT / "tools" / "npu_schemas.py"), str(wheel)])
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(stubs),
        "PYTHONPATH": os.pathsep.join(map(str, (unpacked, ROOT / "services", ROOT / "clients" / "python"))),
        # Nothing else may try to import it first.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    traced = subprocess.call([sys.executable, str(ROOT / "tools" / "_npu_trace.py")], env=environment)
    return code or traced


if __name__ == "__main__":
    sys.exit(main())
