"""Make the packages of clients/sdks in build/sdks: Go, TypeScript, Java, C++, Ruby, and the protos by themselves.

python tools/make_sdks.py [--out FOLDER] [go typescript java cpp ruby protos]

A package is the folder of clients/sdks with generated code beside its files. Compilers are those on PATH (Debian 12's
will do); TypeScript's comes from npm.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
TEMPLATES = ROOT / "clients" / "sdks"
OUT = ROOT / "build" / "sdks"
SOURCES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("penstock/v1/*.proto"))
# Error details from googleapis-common-protos, for languages with libraries that lack them.
GOOGLE = ["google/rpc/status.proto", "google/rpc/error_details.proto"]
# Program -> Debian's package.
PACKAGES = {
    "protoc": "protobuf-compiler",
    "protoc-gen-go": "protoc-gen-go",
    "protoc-gen-go-grpc": "protoc-gen-go-grpc",
    "grpc_java_plugin": "protobuf-compiler-grpc-java-plugin",
    "grpc_tools_ruby_protoc": "ruby-grpc-tools",
    "npm": "npm",
}
# What protoc and Ruby's compiler, which has no copy of its own, read from /usr/include.
WELL_KNOWN = "google/protobuf/struct.proto"
WELL_KNOWN_PACKAGE = "libprotobuf-dev"
# ts-proto: services for grpc-js, bigint for 64 bits, unset optional fields as undefined.
TS_OPTIONS = (
    "outputServices=grpc-js,esModuleInterop=true,forceLong=bigint,useOptionals=messages,oneof=properties,env=node"
)
# grpc-java before 1.59 names an annotation that Java 9 and newer lack.
GENERATED = re.compile(r"@javax\.annotation\.Generated\(.*?\)\n", re.DOTALL)


class Missing(Exception):
    """A program, or what one reads, that is not installed."""


def program(name: str) -> str:
    """Return the path of a program. Raises Missing naming Debian's package."""
    found = shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed: Debian's package {PACKAGES[name]} has it")
    return found


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command. Raises subprocess.CalledProcessError."""
    subprocess.run(command, cwd=cwd, check=True)


def protoc(*flags: str, compiler: str = "protoc", more: Sequence[str] = ()) -> None:
    """Run protoc over all protos of penstock.v1, and `more`. Raises Missing, subprocess.CalledProcessError."""
    command = [program(compiler), f"-I{PROTOS}", f"-I{google_protos()}", *flags, *SOURCES, *more]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    # Its package does without them when recommended packages are left out.
    if f"{WELL_KNOWN}: File not found" in done.stderr:
        raise Missing(f"{compiler} finds no {WELL_KNOWN}: Debian's package {WELL_KNOWN_PACKAGE} has it")
    sys.stderr.write(done.stderr)
    done.check_returncode()


def google_protos() -> Path:
    """Folder of googleapis-common-protos, which every environment of the client has."""
    import google.rpc

    return Path(next(iter(google.rpc.__path__))).parents[1]


def version() -> str:
    """Version of this release."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no version")
    return found[1]


def go(out: Path) -> None:
    """A module: types and stubs."""
    plugins = [f"--plugin={program(name)}" for name in ("protoc-gen-go", "protoc-gen-go-grpc")]
    places = [f"--go_out={out}", f"--go-grpc_out={out}"]
    protoc(*plugins, *places, "--go_opt=paths=source_relative", "--go-grpc_opt=paths=source_relative")


def typescript(out: Path) -> None:
    """An npm package: sources, and what tsc makes of them."""
    run(program("npm"), "install", "--silent", "--no-audit", "--no-fund", cwd=out)
    source = out / "src"
    source.mkdir()
    plugin = out / "node_modules" / ".bin" / "protoc-gen-ts_proto"
    protoc(f"--plugin={plugin}", f"--ts_proto_out={source}", f"--ts_proto_opt={TS_OPTIONS}", more=GOOGLE)
    folders = ("penstock/v1", "google/rpc")
    names = [f"{folder}/{path.stem}" for folder in folders for path in sorted((source / folder).glob("*.ts"))]
    # Every file exports constants about itself under the same names: names are listed, not starred.
    lines = [f'export {{ {", ".join(exported(source / f"{name}.ts"))} }} from "./{name}";' for name in names]
    (source / "index.ts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(program("npm"), "run", "--silent", "build", cwd=out)


def exported(path: Path) -> Iterable[str]:
    """Names that a generated file exports."""
    found = re.findall(
        r"^export (?:const|enum|function|interface) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    helpers = {"protobufPackage", "protobufFileName", "MessageFns"}
    return sorted(set(found) - helpers)


def java(out: Path) -> None:
    """A Maven project."""
    source = out / "src" / "main" / "java"
    source.mkdir(parents=True)
    plugin = f"--plugin=protoc-gen-grpc-java={program('grpc_java_plugin')}"
    protoc(plugin, f"--java_out={source}", f"--grpc-java_out={source}")
    for path in source.rglob("*Grpc.java"):
        path.write_text(GENERATED.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run([program("protoc"), "--version"], capture_output=True, text=True, check=True)
    # protoc 21.12 calls itself 3.21.12, and is Java's 3.21.12; from 22 on Java counts by 4.
    number = done.stdout.split()[1]
    runtime = number if number.startswith("3.") else f"4.{number}"
    pom = out / "pom.xml"
    pom.write_text(pom.read_text(encoding="utf-8").replace("@PROTOBUF_JAVA@", runtime), encoding="utf-8")


def cpp(out: Path) -> None:
    """A CMake project with the protos, which it generates from."""
    for folder, sources in ((PROTOS, SOURCES), (google_protos(), GOOGLE)):
        for source in sources:
            target = out / "protos" / source
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / source, target)


def ruby(out: Path) -> None:
    """A gem."""
    library = out / "lib"
    library.mkdir()
    protoc(f"--ruby_out={library}", f"--grpc_out={library}", compiler="grpc_tools_ruby_protoc")


def protos(out: Path) -> None:
    """The protos with their vectors as an archive, and the descriptor set: what a release attaches."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"penstock-protos-{version()}"
    with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
        for path in [*sorted(PROTOS.glob("penstock/*/*.proto")), *sorted(PROTOS.glob("conformance/*"))]:
            archive.add(path, f"{name}/{path.relative_to(PROTOS)}")
    shutil.copyfile(PROTOS / "penstock.binpb", out / f"penstock-{version()}.binpb")


MAKERS: dict[str, Callable[[Path], None]] = {
    "go": go,
    "typescript": typescript,
    "java": java,
    "cpp": cpp,
    "ruby": ruby,
    "protos": protos,
}


def make(name: str, out: Path) -> Path:
    """Make one package anew and return its folder. Raises Missing, subprocess.CalledProcessError."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    if (TEMPLATES / name).is_dir():
        shutil.copytree(TEMPLATES / name, folder, ignore=shutil.ignore_patterns("node_modules"))
        shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    MAKERS[name](folder)
    return folder


def main() -> int:
    """Make packages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("names", nargs="*", metavar="name", choices=[*MAKERS, []], help=", ".join(MAKERS))
    arguments = parser.parse_args()
    missing = 0
    for name in arguments.names or MAKERS:
        try:
            print(make(name, arguments.out))
        except Missing as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing += 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
