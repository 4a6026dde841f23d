"""Every way to start, with each default as users have it: nothing is switched off, by flag or by variable."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import factories.servers.stack as stack
import grpc
import psutil
import pytest
from factories.models.carried_heads import Carried
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import text_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock import Generator
from penstock.v1 import config_pb2, generation_pb2, generation_pb2_grpc
from penstock_client import Client

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 16
# A start that hangs is one that takes longer; a stop is one that was not obeyed.
START_SECONDS, STOP_SECONDS = 120.0, 30.0
# Longer than both: whoever waits this out has not obeyed.
FOREVER = "600"


@contextlib.contextmanager
def started(role: str | None, *flags: str) -> Iterator[stack.Process]:
    process = stack.start(role, *flags, defaults=True)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            for member in psutil.Process(process.popen.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.kill()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--tensor-parallel", "2"), marks=pytest.mark.slow),
        pytest.param(("--generation-replicas", "2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_tree_starts_with_its_defaults_answers_and_stops(flags: tuple[str, ...]) -> None:
    """`penstock serve`, without a MODEL: the demo model. Only its ports are others, which may be taken."""
    with started(None, "--http-port", "0", *flags) as process:
        stack.wait_serving(process.address, process, START_SECONDS)
        with Client(process.address) as client:
            assert client.generate("One, two", max_new_tokens=4).text
        assert process.terminate(STOP_SECONDS) == 0, process.output()


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.slow), ("--tensor-parallel", "2")], ids=" ".join)
def test_services_start_one_by_one_with_their_defaults(flags: tuple[str, ...]) -> None:
    """Beside them two more routers with a flag, and a tokenizer that has it too: the generation service has neither."""
    with contextlib.ExitStack() as opened:
        tokenizer = opened.enter_context(started("tokenizer"))
        generation = opened.enter_context(started("generation", *flags))
        where = ("--tokenizer", tokenizer.address, "--backend", generation.address)
        router = opened.enter_context(started("router", *where))
        gateway = opened.enter_context(started("gateway", "--router", router.address))
        detokenized = opened.enter_context(started("router", *where, "--detokenize", "tokenizer"))
        tokenizers = opened.enter_context(started("tokenizer", "--processes", "2"))
        where = ("--tokenizer", tokenizers.address, "--backend", generation.address)
        routers = opened.enter_context(started("router", *where, "--processes", "2"))
        for process in (tokenizer, tokenizers, generation, router, detokenized, routers):
            stack.wait_serving(process.address, process, START_SECONDS)
        for process in (router, detokenized, routers):
            with Client(process.address) as client:
                assert client.generate("One, two", max_new_tokens=4).text
        for process in (gateway, router, detokenized, routers, generation, tokenizer, tokenizers):
            assert process.terminate(STOP_SECONDS) == 0, process.output()


def test_models_of_a_folder_start_with_their_defaults(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text_checkpoint(tmp_path / name)
    with started(None, "--http-port", "0", "--models", str(tmp_path)) as process:
        stack.wait_serving(process.address, process, START_SECONDS)
        with Client(process.address) as client:
            for name in ("one", "two"):
                assert client.generate("One, two", model=name, max_new_tokens=4).started.model == name
        assert process.terminate(STOP_SECONDS) == 0, process.output()


def test_services_start_one_by_one_on_another_transport() -> None:
    flags = ("--transport", "grpc")
    with contextlib.ExitStack() as opened:
        tokenizer = opened.enter_context(started("tokenizer", *flags))
        generation = opened.enter_context(started("generation", *flags))
        where = ("--tokenizer", tokenizer.address, "--backend", generation.address)
        router = opened.enter_context(started("router", *where, *flags))
        for process in (tokenizer, generation, router):
            stack.wait_serving(process.address, process, START_SECONDS)
        with Client(router.address) as client:
            assert client.generate("One, two", max_new_tokens=4).text
        for process in (router, generation, tokenizer):
            assert process.terminate(STOP_SECONDS) == 0, process.output()


@pytest.mark.parametrize("flag", ["--vllm-engine", "--kv-disk", "--draft-head"])
def test_a_service_starts_with_a_flag_and_answers(checkpoint: Path, tmp_path: Path, flag: str) -> None:
    model, value = checkpoint, {"--kv-disk": (str(tmp_path / "blocks"),), "--draft-head": ("checkpoint",)}.get(flag, ())
    if flag == "--draft-head":
        model = Carried(tmp_path, "deepseek_v3").folder
    with started("generation", str(model), "--no-load-tokenizer", flag, *value) as process:
        stack.wait_serving(process.address, process, START_SECONDS)
        assert num_ids(process) == NUM_TOKENS
        assert process.terminate(STOP_SECONDS) == 0, process.output()


def num_ids(process: stack.Process) -> int:
    """Ask a generation service, and return how many ids it answers."""
    asked = generation_pb2.GenerateRequest(
        prompt_token_ids=PROMPT,
        config=config_pb2.GenerationConfig(max_new_tokens=NUM_TOKENS),
        stop=config_pb2.StopConfig(ignore_eos=True),
    )
    with grpc.insecure_channel(process.address) as channel:
        events = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked, timeout=START_SECONDS)
        return sum(len(event.delta.token_ids) for event in events)


def test_an_empty_service_starts_with_its_defaults_and_waits_for_a_model() -> None:
    """Nothing serves but its control services."""
    with started("generation", "--empty") as process:
        with grpc.insecure_channel(process.address) as channel:
            request = health_pb2.HealthCheckRequest(service="penstock.v1.GenerationAdminService")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=START_SECONDS, wait_for_ready=True)
            assert any(update.status == health_pb2.HealthCheckResponse.SERVING for update in watch), process.output()
        assert process.terminate(STOP_SECONDS) == 0, process.output()


@pytest.mark.parametrize(
    "flags", [("--quantization", "int4"), ("--quantization", "int8", "--kv-cache-dtype", "int8")], ids=" ".join
)
def test_a_service_makes_a_number_format_at_its_first_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A served process leaves parts of torch unloaded, which a Generator and the forks of tests have."""
    folder = tiny_checkpoint(tmp_path / "model")
    with started("generation", str(folder), "--no-load-tokenizer", *flags) as process:
        stack.wait_serving(process.address, process, START_SECONDS)
        assert process.terminate(STOP_SECONDS) == 0, process.output()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel": 2},
        {"assistant_model": "model", "host_kv_memory": "4MiB", "kv_cache_dtype": "int8"},
        # A service makes both formats above.
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),
        {"model_route": "fallback"},
    ],
    ids=str,
)
def test_a_generator_starts_with_its_defaults(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Nothing is given but what the case is about: the step sizes are measured, and memory is taken as for users."""
    for name in set(os.environ) - set(stack.default_environment({})):
        monkeypatch.delenv(name)
    given = {name: str(checkpoint) if value == "model" else value for name, value in options.items()}
    # The folder has no tokenizer.
    with Generator(checkpoint, load_tokenizer=False, **given) as generator:
        assert len(generator.generate(PROMPT, max_new_tokens=4, ignore_eos=True).choices[0].token_ids) == 4


def test_sigterm_ends_a_start_that_waits_for_a_rank(tmp_path: Path) -> None:
    """Rank 0 waits in a sum for a rank that is stopped: neither of them is left, and nobody waits out the group's
    patience."""
    folder = tiny_checkpoint(tmp_path / "model", max_position_embeddings=8192)
    flags = (str(folder), "--no-load-tokenizer", "--tensor-parallel", "2", "--threads", "2", "--tune-seconds", "60")
    with started("generation", *flags) as process:
        # It has seconds of steps before it.
        while "measuring step sizes" not in process.output():
            # Whoever looks without a pause takes the time from those that measure.
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {process.popen.wait(0.05)}: {process.output()}")
        (rank,) = psutil.Process(process.popen.pid).children()
        rank.send_signal(signal.SIGSTOP)
        assert process.terminate(STOP_SECONDS) == 0, process.output()
        assert "batch size" not in process.output()
        assert not rank.is_running()


def handles(pid: int, number: signal.Signals) -> bool:
    """True for a process that has a handler of its own for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def stopped_child(process: stack.Process, name: str) -> psutil.Process:
    """Stop a process of a start as soon as it handles signals, and return it: the start waits for it.

    Before that SIGTERM would end it, stopped or not. A child that is not its own program yet has its parent's command
    line and handlers, and the parent waits for it.
    """
    parent = psutil.Process(process.popen.pid)
    while True:
        for child in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                line = child.cmdline()
                if name in line and line != parent.cmdline() and handles(child.pid, signal.SIGTERM):
                    child.send_signal(signal.SIGSTOP)
                    return child
        # Whoever looks without a pause takes the time from those that start.
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with {process.popen.wait(0.02)}: {process.output()}")


@pytest.mark.parametrize(
    ("role", "flags", "name"),
    [
        (None, ("--http-port", "0"), "generation"),
        (None, ("--http-port", "0"), "tokenizer"),
        (None, ("--http-port", "0", "--generation-replicas", "2"), "generation"),
        ("router", ("--processes", "2", "--tokenizer", "127.0.0.1:1", "--backend", "127.0.0.1:1"), "router"),
    ],
    ids=["generation of a tree", "tokenizer of a tree", "one of two replicas", "worker of a router"],
)
def test_sigterm_ends_a_tree_that_waits_for_a_child(role: str | None, flags: tuple[str, ...], name: str) -> None:
    """The grace is for work: a child that was never ready has none."""
    with started(role, *flags, "--drain-grace-seconds", FOREVER) as process:
        child = stopped_child(process, name)
        assert process.terminate(STOP_SECONDS) == 0, process.output()
        assert not child.is_running()


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        ("router", ("--tokenizer", "127.0.0.1:1", "--backend", "127.0.0.1:1")),
        ("gateway", ("--router", "127.0.0.1:1", "--start-timeout-seconds", FOREVER)),
    ],
)
def test_sigterm_ends_a_start_that_waits_for_another_service(role: str, flags: tuple[str, ...]) -> None:
    with started(role, *flags, "--drain-grace-seconds", FOREVER) as process:
        with contextlib.closing(connected(process)):
            # It listens, so it has begun to wait.
            assert process.popen.poll() is None
        assert process.terminate(STOP_SECONDS) == 0, process.output()


def connected(process: stack.Process) -> socket.socket:
    """Connect to a process's port once it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", process.port), timeout=START_SECONDS)
        except ConnectionRefusedError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {process.popen.wait(0.05)}: {process.output()}")
