"""Generate the Python stubs of protos/penstock into services/penstock, and the descriptor set protos/penstock.binpb.

Run `python protos/generate.py` after changing a proto; `--check` writes nothing and exits 1 when a checked-in file
differs from what the protos give.

The compiler is an old one on purpose: stubs run with the protobuf and grpcio of their compiler and with later releases,
never with earlier ones, and clients may have packages that hold protobuf back. Stubs of this one run with protobuf 5
to 7. It has its own folder (build/stub-compiler), since it does not work with the services' protobuf.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
TARGET = ROOT / "services" / "penstock"
DESCRIPTORS = PROTOS / "penstock.binpb"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
# The last release with stubs that need only protobuf 5.26 and grpcio 1.63; wheels are for Python 3.11 and 3.12.
COMPILER = "grpcio-tools==1.63.2"


def compiler() -> Path:
    """Return the folder of the compiler, installed once. Raises RuntimeError with pip's words."""
    folder = (
        ROOT / "build" / "stub-compiler" / f"{COMPILER.replace('==', '-')}-{sys.version_info[0]}.{sys.version_info[1]}"
    )
    if not (folder / "grpc_tools").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--target", str(folder), COMPILER], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{COMPILER} cannot be installed; it has wheels for Python 3.11 and 3.12\n{done.stderr}")
    return folder


def generate(out: Path) -> dict[str, bytes]:
    """Run protoc into `out` and return {path below the repository: content}. Raises RuntimeError when it refuses."""
    folder = compiler()
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("penstock/*/*.proto"))
    flags = [f"--{plugin}={out}" for plugin in ("python_out", "grpc_python_out")]
    # Named by path: the programs of an environment that is not activated are not on PATH.
    for plugin in ("mypy", "mypy_grpc"):
        program = Path(sys.executable).parent / f"protoc-gen-{plugin}"
        flags += [f"--plugin=protoc-gen-{plugin}={program}", f"--{plugin}_out=quiet:{out}"]
    flags += ["--include_imports", f"--descriptor_set_out={out / DESCRIPTORS.name}"]
    # -P and a line of code put the folder before site-packages for this program, but not for its plugins.
    program_text = f"import sys; sys.path.insert(0, {str(folder)!r}); from grpc_tools import protoc; "
    program_text += "sys.exit(protoc.main(['protoc', *sys.argv[1:]]))"
    well_known = folder / "grpc_tools" / "_proto"
    command = [sys.executable, "-P", "-c", program_text, f"-I{PROTOS}", f"-I{well_known}", *flags, *sources]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError("protoc failed; its messages are above")
    made = {
        str((TARGET / path.relative_to(out / "penstock")).relative_to(ROOT)): path.read_bytes()
        for path in sorted((out / "penstock").rglob("*"))
        if path.name.endswith(SUFFIXES)
    }
    return {**made, str(DESCRIPTORS.relative_to(ROOT)): (out / DESCRIPTORS.name).read_bytes()}


def differences(wanted: dict[str, bytes]) -> list[str]:
    """Paths of files that are missing, stale or left over."""
    folders = {path.parent.name for path in PROTOS.glob("penstock/*/*.proto")}
    found = [path for folder in folders for path in (TARGET / folder).glob("*") if path.name.endswith(SUFFIXES)]
    present = {str(path.relative_to(ROOT)): path.read_bytes() for path in [*found, DESCRIPTORS] if path.exists()}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main() -> int:
    """Write or check the files; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report files that differ")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    changed = differences(wanted)
    if arguments.check:
        for name in changed:
            print(f"{name} differs: run python protos/generate.py", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wanted[name]) if name in wanted else path.unlink()
    print(f"{len(changed)} of {len(wanted)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
