"""Run the compose stacks for real: build, up, healthy, chat by gRPC and HTTP, scale, kill a backend, scrape; then take
them down.

Needs a Docker engine with `docker compose` or docker-compose. Where no image registry is reachable, run
deploy/docker/offline.sh first and source deploy/docker/offline.env. The result is printed, and written as Markdown with
--out. Without names all stacks are run, one after another:

    plain    docker-compose.yml
    tls      with docker-compose.tls.yml: TLS, without certificates of clients and without a token
    token    the same with a bearer token
    mutual   the same with certificates of clients instead
    strict   docker-compose.tls.yml as it is: certificates of clients and a token

    python deploy/docker/check_stack.py --out dev/log/compose-run.md
    python deploy/docker/check_stack.py tls mutual
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock_client import AsyncClient, Client, ClientConfig, Completion, TLSConfig

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "penstock-check"
ROUTER = f"localhost:{os.environ.get('PENSTOCK_GRPC_PORT', '50050')}"
GATEWAY = f"localhost:{os.environ.get('PENSTOCK_HTTP_PORT', '8000')}"
PROMETHEUS = f"http://localhost:{os.environ.get('PROMETHEUS_PORT', '9090')}"
ROLES = ["tokenizer", "generation", "router", "gateway"]
# Grafana is left out: its image comes from a registry only, and a test checks its dashboard against the metrics.
SERVICES = [*ROLES, "prometheus"]
# Of the metrics port of the container that this runs in: the status without and with the token.
ASK_METRICS = """
import ssl, sys, urllib.error, urllib.request
tls = ssl.create_default_context(cafile="/certs/ca.pem")
tls.load_cert_chain("/certs/service.pem", "/certs/service.key")
for token in (None, open("/certs/token").read().strip()):
    headers = {"authorization": "Bearer " + token} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=headers), context=tls) as answer:
            print(answer.status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises CalledProcessError; the command's errors go to the terminal."""
    whole = {**os.environ, **(environment or {})}
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=whole).stdout


@functools.cache
def compose_command() -> list[str]:
    """`docker compose` where Docker has that plugin, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


def until(condition: Callable[[], bool], what: str, timeout: float = 300.0) -> None:
    """Poll until `condition` holds. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.5)


def query(expression: str) -> list[float]:
    """Values of an instant query at Prometheus."""
    url = f"{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as response:
        answer = json.load(response)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


@dataclass(frozen=True)
class Stack:
    """One of the stacks: its name, and what its services want of who calls them."""

    name: str
    tls: bool = False
    client_certificates: bool = False
    token: bool = False
    # Folder with what make_certs.sh makes.
    certs: Path = Path()

    def compose(self, *arguments: str) -> str:
        """docker-compose with this check's own project name."""
        files = ["-f", "docker-compose.yml", *(["-f", "docker-compose.tls.yml"] if self.tls else [])]
        off = {}
        if not self.client_certificates:
            off["PENSTOCK_TLS_CLIENT_CA"] = ""
        if not self.token:
            off["PENSTOCK_AUTH_TOKEN_FILE"] = ""
        command = [*compose_command(), *files, "-p", PROJECT, "--profile", "observability", *arguments]
        return run(*command, environment={**off, "CERTS": str(self.certs)} if self.tls else None)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "-q", service).split()

    def healthy(self, service: str) -> bool:
        """Every container of the service runs and reports healthy."""
        ids = self.containers(service)
        states = [run("docker", "inspect", "-f", "{{.State.Health.Status}}", one).strip() for one in ids]
        return bool(states) and all(state == "healthy" for state in states)

    def client(self, **changes: Path | None) -> ClientConfig:
        """Configuration of a client that gives what this stack asks for; `changes` are of its TLS."""
        if not self.tls:
            return ClientConfig()
        files: dict[str, Path | None] = {"ca_file": self.certs / "ca.pem"}
        if self.client_certificates:
            files |= {"cert_file": self.certs / "client.pem", "key_file": self.certs / "client.key"}
        token = (self.certs / "token").read_text().strip() if self.token else None
        return ClientConfig(tls=TLSConfig(**(files | changes)), token=token)  # type: ignore[arg-type]

    def flags(self, *, ca: bool = True, certificate: Path | None = None, token: bool = True) -> list[str]:
        """Flags of `penstock complete`, with a folder of client certificates when there is one."""
        flags = ["--tls-ca", str(self.certs / "ca.pem")] if ca else []
        if certificate:
            flags += ["--client-cert", str(certificate / "client.pem"), "--client-key", str(certificate / "client.key")]
        return flags + (["--token-file", str(self.certs / "token")] if token and self.token else [])

    def http(self, path: str, body: object = None, *, token: bool = True) -> tuple[int, bytes]:
        """Status and body of the gateway's answer; POST where there is a body."""
        headers = {"content-type": "application/json"}
        if token and self.token:
            headers["authorization"] = "Bearer " + (self.certs / "token").read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        url = f"{'https' if self.tls else 'http'}://{GATEWAY}{path}"
        tls = ssl.create_default_context(cafile=self.certs / "ca.pem") if self.tls else None
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120, context=tls) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


class Report:
    """Steps with their durations and a line of what was seen."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, str]] = []
        self.stack = ""

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time a step; what it appends to the list is its result."""
        seen: list[str] = []
        start = time.monotonic()
        yield seen
        self.rows.append((self.stack, name, time.monotonic() - start, "; ".join(seen)))
        print(f"{self.stack}: {name}: {self.rows[-1][3]} ({self.rows[-1][2]:.1f} s)", flush=True)

    def markdown(self) -> str:
        """The whole run as a page."""
        commit = run("git", "rev-parse", "--short", "HEAD").strip()
        engine = run("docker", "version", "-f", "{{.Server.Version}}").strip()
        head = (
            "# Last run of the compose stacks\n\n"
            f"`python deploy/docker/check_stack.py`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit}, Docker "
            f"{engine}, base image `{os.environ.get('PENSTOCK_BASE', 'python:3.11-slim-bookworm')}`, load average "
            f"{os.getloadavg()[2]:.0f} on {os.cpu_count()} cores.\n\n"
            "| stack | step | seconds | seen |\n|---|---|---|---|\n"
        )
        rows = [(stack, name, f"{seconds:.1f}", seen.replace("|", "\\|")) for stack, name, seconds, seen in self.rows]
        return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def image_facts(role: str) -> str:
    """User, and whether torch and a compiler are in the image of a role."""
    image = f"penstock-{role}:{os.environ.get('PENSTOCK_VERSION', '0.1.0')}"
    find = (
        "import importlib.util as u, os, shutil; "
        "print(os.getuid(), bool(u.find_spec('torch')), bool(shutil.which('g++') or shutil.which('c++')))"
    )
    uid, torch, compiler = run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", find).split()
    if uid == "0" or (torch == "True") != (role == "generation") or compiler == "True":
        raise RuntimeError(f"{image}: uid {uid}, torch {torch}, compiler {compiler}")
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", image))
    return f"{role} {size / 1e6:.0f} MB (uid {uid}, torch {torch}, compiler {compiler})"


def device_of_generation(stack: Stack) -> str:
    """What the running generation service says that it computes on. Raises RuntimeError without C++ kernels."""
    logs = stack.compose("logs", "--no-color", "generation")
    line = next(line for line in logs.splitlines() if " on cpu (" in line)
    device = line[line.index("cpu (") :]
    if "kernels" not in device:
        raise RuntimeError(f"generation runs without its kernels: {device}")
    return device


def probe_answers(stack: Stack) -> str:
    """What the containers' own health checks answered last. Raises RuntimeError for another answer than SERVING."""
    answers = {}
    for role in ROLES:
        state = run("docker", "inspect", "-f", "{{json .State.Health}}", stack.containers(role)[0])
        answers[role] = json.loads(state)["Log"][-1]["Output"].strip()
    if set(answers.values()) != {"SERVING"}:
        raise RuntimeError(f"health checks answered {answers}")
    return "their health checks answer SERVING by the health socket"


async def kill_one_of_two(stack: Stack) -> list[Completion]:
    """16 long chats; one backend is killed once every chat has begun."""
    async with AsyncClient(ROUTER, stack.client()) as client:
        streams = [
            client.stream(
                [{"role": "user", "content": f"{i}: count from 1 to 20."}], max_new_tokens=600, ignore_eos=True
            )
            for i in range(16)
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await asyncio.to_thread(run, "docker", "kill", stack.containers("generation")[0])
        return await asyncio.gather(*(stream.result() for stream in streams))


def refusal(flags: list[str], words: str) -> str:
    """What `penstock complete` says when it is refused. Raises RuntimeError when it is not, or without `words`."""
    command = [sys.executable, "-m", "penstock.cli.main", "complete", "--address", ROUTER, *flags, "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    told = done.stderr.strip()
    if done.returncode == 0 or words not in told or len(told.splitlines()) != 1:
        raise RuntimeError(
            f"penstock complete {' '.join(flags)}: exit code {done.returncode}, {done.stdout!r}, {told!r}"
        )
    return told


def refusals(stack: Stack, report: Report, folder: Path) -> None:
    """Clients that lack what the stack wants are told what they lack."""
    with report.step("a client in plaintext") as seen:
        seen.append(refusal(stack.flags(ca=False, token=False), "speaks TLS"))
    if stack.client_certificates:
        with report.step("a client without a certificate") as seen:
            seen.append(refusal(stack.flags(), "wants a client certificate"))
        with report.step("a client with another CA's certificate") as seen:
            foreign = folder / "foreign"
            run("deploy/tls/make_certs.sh", str(foreign))
            seen.append(refusal(stack.flags(certificate=foreign), "wants a client certificate"))
    if stack.token:
        with report.step("a client without the token") as seen:
            own = stack.certs if stack.client_certificates else None
            seen.append(refusal(stack.flags(certificate=own, token=False), "UNAUTHENTICATED"))
        with report.step("metrics without the token and with it") as seen:
            ports = {"router": 9100, "tokenizer": 9101, "generation": 9102, "gateway": 8000}
            for role, port in ports.items():
                container = stack.containers(role)[0]
                ask = ("python", "-c", ASK_METRICS, f"https://localhost:{port}/metrics")
                answers = run("docker", "exec", container, *ask).split()
                if answers != ["401", "200"]:
                    raise RuntimeError(f"the metrics of {role} answered {answers}")
            seen.append("401 and 200 from each service")


def build(stack: Stack, report: Report) -> None:
    """The images, which all stacks share."""
    with report.step("build") as seen:
        stack.compose("build", "-q", *ROLES)
        seen += [image_facts(role) for role in ROLES]


def check(stack: Stack, report: Report, folder: Path) -> None:
    """The steps, in order. Raises on the first that fails."""
    with report.step("up") as seen:
        stack.compose("up", "-d", *SERVICES)
        for service in ROLES:
            until(lambda service=service: stack.healthy(service), f"{service} healthy")  # type: ignore[misc]
        seen.append(f"tokenizer, generation, router and gateway healthy; generation on {device_of_generation(stack)}")
        seen.append(probe_answers(stack))
    with report.step("chat") as seen, Client(ROUTER, stack.client()) as client:
        answer = client.generate([{"role": "user", "content": "What is Penstock?"}], max_new_tokens=64)
        seen.append(f"{answer.text.strip()!r}, {answer.choices[0].finish_reason}")
    with report.step("chat by HTTP") as seen:
        body = {"messages": [{"role": "user", "content": "What is Penstock?"}], "max_tokens": 64}
        status, text = stack.http("/v1/chat/completions", body)
        choice = json.loads(text)["choices"][0] if status == 200 else text
        if status != 200 or choice["message"]["content"] != answer.text:
            raise RuntimeError(f"the gateway answered {status}, {choice}")
        seen.append(f"the same answer, {choice['finish_reason']}")
        status, page = stack.http("/", token=False)
        if status != 200 or b"<html" not in page:
            raise RuntimeError(f"the chat page is {status}")
        seen.append("the chat page is there")
        if stack.token:
            status, _ = stack.http("/v1/chat/completions", body, token=False)
            if status != 401:
                raise RuntimeError(f"without the token the gateway answered {status}")
            seen.append("401 without the token")
    if stack.tls:
        refusals(stack, report, folder)
    with report.step("scale generation to 2") as seen:
        stack.compose("up", "-d", "--no-recreate", "--scale", "generation=2", *SERVICES)
        until(lambda: len(stack.containers("generation")) == 2 and stack.healthy("generation"), "two healthy backends")
        with Client(ROUTER, stack.client()) as client:
            until(lambda: client.get_model().backends == 2, "the router sees both")
        seen.append("the router sees 2 backends")
    with report.step("metrics") as seen:
        until(lambda: sum(query('up{job=~"penstock-.*"}')) == 5, "Prometheus scrapes 5 targets")
        until(lambda: sum(query("penstock_generation_tokens_total")) > 0, "Prometheus has counted tokens")
        seen.append("5 targets up, penstock_generation_tokens_total > 0")
    with report.step("kill one of two backends under 16 streams") as seen:
        completions = asyncio.run(kill_one_of_two(stack))
        if any(one.usage.completion_tokens != 600 for one in completions):
            raise RuntimeError("a stream lost tokens")
        moved = sum(one.finished.attempts > 1 for one in completions)
        seen.append(f"16 of 16 streams finished with all their tokens, {moved} of them moved")
    with report.step("stop") as seen:
        survivors = [one for role in ROLES for one in stack.containers(role)]
        stack.compose("stop")
        codes = [run("docker", "inspect", "-f", "{{.State.ExitCode}}", one).strip() for one in survivors]
        seen.append(f"exit codes {', '.join(codes)}")
        if any(code not in ("0", "137") for code in codes) or codes.count("137") > 1:
            raise RuntimeError(f"exit codes {codes}")


def stacks(certs: Path) -> dict[str, Stack]:
    """All stacks, by name."""
    every = (
        Stack("plain"),
        Stack("tls", tls=True, certs=certs),
        Stack("token", tls=True, token=True, certs=certs),
        Stack("mutual", tls=True, client_certificates=True, certs=certs),
        Stack("strict", tls=True, client_certificates=True, token=True, certs=certs),
    )
    return {stack.name: stack for stack in every}


def main() -> int:
    """Run the checks and always take the stack down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(stacks(Path()))
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=f"{', '.join(names)}; all of them without a name")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.stacks if name not in names]:
        parser.error(f"there is no stack {unknown[0]!r}: {', '.join(names)}")
    folder = Path(tempfile.mkdtemp(prefix="penstock-check-"))
    report = Report()
    try:
        run("deploy/tls/make_certs.sh", str(folder / "certs"))
        for number, name in enumerate(arguments.stacks or names):
            stack = stacks(folder / "certs")[name]
            report.stack = name
            try:
                if number == 0:
                    build(stack, report)
                check(stack, report, folder)
            except BaseException:
                print(stack.compose("logs", "--tail", "40"), file=sys.stderr)
                raise
            finally:
                stack.compose("down", "-v", "--remove-orphans")
    finally:
        shutil.rmtree(folder)
    if arguments.out:
        arguments.out.write_text(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
