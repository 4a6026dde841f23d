"""Packages of `make sdks` and the wheel penstock-client, by clients with generated types (tests/clients/generated).

Each passes the conformance vectors and chats with a running stack.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from factories.servers.stack import Stack
from factories.wire.conversation import user
from penstock_client import Client

from tools import make_sdks

pytestmark = pytest.mark.clients
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "clients" / "generated"
VECTORS = ROOT / "protos" / "conformance" / "v1.json"
# The ends of the ranges in clients/python/pyproject.toml.
OLDEST = ("protobuf==5.26.1", "grpcio==1.63.2", "googleapis-common-protos==1.65.0")
MIDDLE = ("protobuf>=6,<7",)
GOPATH = Path("/usr/share/gocode")
JARS = (
    "grpc-*",
    "netty-*",
    "guava",
    "failureaccess",
    "perfmark*",
    "protobuf",
    "protobuf-util",
    "gson",
)


def run(command: list[str], folder: Path | None = None, **environment: str) -> str:
    """Run a program and return its output, which a failure shows."""
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=variables, cwd=folder, check=False)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
    return done.stdout


def sdk(name: str, folder: Path) -> Path:
    """Make the package, or skip."""
    try:
        return make_sdks.make(name, folder / "sdks")
    except make_sdks.Missing as missing:
        pytest.skip(f"{missing}; last run recorded in docs/learn/testing.md")


def build_go(folder: Path) -> list[str]:
    """Debian's grpc-go is no module: the package goes into a GOPATH beside it."""
    if shutil.which("go") is None or not (GOPATH / "src/google.golang.org/grpc").is_dir():
        pytest.skip("no golang-go with golang-google-grpc-dev; last run recorded in docs/learn/testing.md")
    package = sdk("go", folder)
    place = folder / "gopath" / "src" / "github.com" / "penstock" / "penstock" / "gen"
    place.mkdir(parents=True)
    shutil.copytree(package, place / "go")
    program = folder / "client"
    environment = {"GO111MODULE": "off", "GOPATH": f"{folder / 'gopath'}:{GOPATH}", "GOCACHE": str(folder / "cache")}
    run(["go", "build", "-o", str(program), str(SOURCES / "main.go")], **environment)
    return [str(program)]


def build_typescript(folder: Path) -> list[str]:
    package = sdk("typescript", folder)
    program = folder / "program"
    (program / "src").mkdir(parents=True)
    shutil.copyfile(SOURCES / "main.ts", program / "src" / "main.ts")
    shutil.copyfile(package / "tsconfig.json", program / "tsconfig.json")
    # As npm would install it, with the package's own dependencies beside it.
    modules = program / "node_modules"
    shutil.copytree(package / "node_modules", modules, symlinks=True)
    files = shutil.ignore_patterns("node_modules", "src")
    shutil.copytree(package, modules / "penstock-client", ignore=files)
    run([str(modules / ".bin" / "tsc")], program)
    return ["node", str(program / "dist" / "main.js")]


def build_java(folder: Path) -> list[str]:
    if shutil.which("javac") is None:
        pytest.skip("no javac; last run recorded in docs/learn/testing.md")
    package = sdk("java", folder)
    jars = ":".join(str(jar) for name in JARS for jar in sorted(Path("/usr/share/java").glob(f"{name}.jar")))
    classes = folder / "classes"
    # Debian's proto-google-common-protos is older than ErrorInfo.
    google = make_sdks.google_protos()
    run(["protoc", f"-I{google}", f"--java_out={package / 'src/main/java'}", *make_sdks.GOOGLE])
    sources = [str(path) for path in sorted((package / "src/main/java").rglob("*.java"))]
    run(
        [
            "javac",
            "-nowarn",
            "-encoding",
            "UTF-8",
            "-cp",
            jars,
            "-d",
            str(classes),
            *sources,
            str(SOURCES / "Main.java"),
        ]
    )
    return ["java", "-Dfile.encoding=UTF-8", "-cp", f"{classes}:{jars}", "Main"]


def build_cpp(folder: Path) -> list[str]:
    if shutil.which("cmake") is None or shutil.which("grpc_cpp_plugin") is None:
        pytest.skip(
            "no cmake with protobuf-compiler-grpc and libgrpc++-dev; last run recorded in docs/learn/testing.md"
        )
    package = sdk("cpp", folder)
    build = str(folder / "build")
    run(["cmake", "-S", str(SOURCES), "-B", build, f"-DSDK={package}", "-DCMAKE_CXX_FLAGS=-O0"])
    run(["cmake", "--build", build, "-j2"])
    return [f"{build}/client"]


def build_ruby(folder: Path) -> list[str]:
    if shutil.which("ruby") is None:
        pytest.skip("no ruby; last run recorded in docs/learn/testing.md")
    return ["ruby", "-I", str(sdk("ruby", folder) / "lib"), str(SOURCES / "main.rb")]


def python_with(*versions: str) -> Callable[[Path], list[str]]:
    """An environment with the wheel alone, beside these versions."""

    def build(folder: Path) -> list[str]:
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "-q",
                "--no-deps",
                "-w",
                str(folder),
                str(ROOT / "clients" / "python"),
            ]
        )
        (wheel,) = folder.glob("penstock_client-*.whl")
        run([python, "-m", "pip", "install", "-q", str(wheel), *versions])
        assert "grpcio-status" not in run([python, "-m", "pip", "list"])
        # Warnings are errors: stubs that are older or newer than their runtime would give one.
        return [python, "-I", "-W", "error", str(SOURCES / "main.py")]

    return build


BUILDS = {
    "python-oldest": python_with(*OLDEST),
    "python-protobuf-6": python_with(*MIDDLE),
    "python-newest": python_with("protobuf>=7"),
    "go": build_go,
    "java": build_java,
    "cpp": build_cpp,
    "typescript": build_typescript,
    "ruby": build_ruby,
}


@pytest.mark.parametrize("language", list(BUILDS))
def test_a_client_with_generated_types_passes_the_vectors_and_chats(
    language: str, stack: Stack, tmp_path: Path
) -> None:
    lines = run([*BUILDS[language](tmp_path), stack.address, str(VECTORS)]).splitlines()
    names = [vector["name"] for vector in json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]]
    assert [line for line in lines if line.startswith("vector ")] == [f"vector {name} ok" for name in names]
    with Client(stack.address) as client:
        expected = client.generate(user("What is Penstock?"), max_new_tokens=64).text
    told = dict(line.split(" ", 1) for line in lines if not line.startswith("vector "))
    assert bytes.fromhex(told["chat"]).decode() == expected
    assert told["error"] == "config.max_new_tokens"


def test_no_file_is_in_both_wheels_and_together_they_start(tmp_path: Path) -> None:
    """From a source distribution of the client, too, whose files lie elsewhere."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w"]
    run([*command, str(tmp_path), str(ROOT / "clients" / "python"), str(ROOT)])
    wheels = sorted(tmp_path.glob("*.whl"))
    services, client = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    assert not services & client
    for name, package in ((services, "penstock"), (client, "penstock_client")):
        assert {f"{package}/protos/penstock.binpb", f"{package}/protos/penstock/v1/text.proto"} <= name
    place = tmp_path / "place"
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *map(str, wheels)])
    code = f"import sys; sys.path.insert(0, {str(place)!r}); "
    code += "import penstock.router.app as app, penstock.v1.text_pb2 as stubs; print(app.__file__, stubs.__file__)"
    told = run([sys.executable, "-I", "-c", code]).split()
    assert all(path.startswith(str(place)) for path in told)
    source = tmp_path / "source"
    build = "import sys; from hatchling.builders.sdist import SdistBuilder as B; "
    build += "print(next(B(sys.argv[1]).build(directory=sys.argv[2])))"
    run([sys.executable, "-m", "pip", "install", "-q", "--target", str(source / "hatch"), "hatchling>=1.27,<2"])
    archive = run(
        [sys.executable, "-c", build, str(ROOT / "clients" / "python"), str(source)], PYTHONPATH=str(source / "hatch")
    ).strip()
    run([*command, str(source), archive])
    (again,) = source.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == client
