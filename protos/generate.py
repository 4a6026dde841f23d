"""Generate the Python stubs of protos/penstock/v1 into services/penstock/v1.

Run `python protos/generate.py` after changing a proto; `--check` writes nothing and exits 1 when the checked-in
stubs differ from what the protos give.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
TARGET = PROTOS.parent / "services" / "penstock" / "v1"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> dict[str, str]:
    """Run protoc into `out` and return {file name: content}. Raises RuntimeError when protoc refuses a proto."""
    well_known = resources.files("grpc_tools") / "_proto"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("penstock/v1/*.proto"))
    flags = [f"--{plugin}={out}" for plugin in ("python_out", "grpc_python_out")]
    # Named, since an environment that is not activated has its programs on no PATH.
    for plugin in ("mypy", "mypy_grpc"):
        program = Path(sys.executable).parent / f"protoc-gen-{plugin}"
        flags += [f"--plugin=protoc-gen-{plugin}={program}", f"--{plugin}_out=quiet:{out}"]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources]) != 0:
        raise RuntimeError("protoc failed; its messages are above")
    produced = out / "penstock" / "v1"
    return {path.name: path.read_text() for path in sorted(produced.iterdir()) if path.name.endswith(SUFFIXES)}


def differences(wanted: dict[str, str]) -> list[str]:
    """Names of stub files that are missing, stale or left over in TARGET."""
    present = {path.name: path.read_text() for path in TARGET.glob("*") if path.name.endswith(SUFFIXES)}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main() -> int:
    """Write or check the stubs; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report stubs that differ")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    changed = differences(wanted)
    if arguments.check:
        for name in changed:
            print(f"services/penstock/v1/{name} differs: run python protos/generate.py", file=sys.stderr)
        return 1 if changed else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (TARGET / name).write_text(wanted[name]) if name in wanted else (TARGET / name).unlink()
    print(f"{len(changed)} of {len(wanted)} stub files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
