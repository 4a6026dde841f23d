"""Backends that are processes of their own, killed and stopped by signals; and the router process's own cost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from factories.servers import stack
from factories.servers.emitting_backend import count_up
from factories.servers.router import Answer, collect, generate, running_router, tokenizer_address, tokenizer_fingerprint
from penstock.v1 import config_pb2

TOKENS, BEFORE = 200, 20
IDS = list(count_up(TOKENS)(None))  # type: ignore[arg-type]
WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)
BACKEND = (sys.executable, "-m", "factories.servers.emitting_backend")
TESTS = Path(__file__).parents[2]


@contextmanager
def backend_process() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A scripted backend that emits BEFORE tokens, and the others after SIGUSR1."""
    port = stack.free_port()
    command = [*BACKEND, "--port", str(port), "--tokens", str(TOKENS), "--allowance", str(BEFORE)]
    with subprocess.Popen([*command, "--fingerprint", tokenizer_fingerprint()], cwd=TESTS) as process:
        try:
            stack.wait_serving(f"127.0.0.1:{port}")
            yield process, f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_stream_outlives_its_backends_process(signal_number: signal.Signals) -> None:
    with backend_process() as (one, first), backend_process() as (two, second):
        # Longer than a busy machine keeps the other one silent.
        async with running_router(backend=(first, second), stall_timeout_seconds=5.0) as router:

            async def strike(answer: Answer) -> None:
                if len(answer.ids()) >= BEFORE and not struck:
                    used = router.metric("backend_requests_total", backend=first)
                    victim, other = (one, two) if used else (two, one)
                    struck.append(victim)
                    victim.send_signal(signal_number)
                    other.send_signal(signal.SIGUSR1)

            struck: list[subprocess.Popen[bytes]] = []
            answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), strike)
            assert answer.ids() == IDS
            assert answer.text() == await router.decode(IDS)
            assert answer.finished.attempts == 2


async def test_a_stream_outlives_its_tokenizer_and_its_backend_killed_together() -> None:
    port = str(stack.free_port())
    # The last of these flags counts: the second process takes the first one's address.
    tokenizer = stack.start("tokenizer", "--port", port)
    address = f"127.0.0.1:{port}"
    again: list[stack.Process] = []
    try:
        stack.wait_serving(address, tokenizer)
        with backend_process() as (one, first), backend_process() as (two, second):
            settings = {"tokenizer": address, "detokenize": "tokenizer", "stall_timeout_seconds": 5.0}
            async with running_router(backend=(first, second), **settings) as router:

                async def strike(answer: Answer) -> None:
                    if len(answer.ids()) >= BEFORE and not again:
                        used = router.metric("backend_requests_total", backend=first)
                        victim, other = (one, two) if used else (two, one)
                        victim.kill()
                        tokenizer.kill()
                        other.send_signal(signal.SIGUSR1)
                        await router.until("tokenizer_up", 0)
                        again.append(stack.start("tokenizer", "--port", port))

                answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), strike)
                assert answer.ids() == IDS
                assert answer.text() == await router.decode(IDS)
                assert answer.finished.attempts == 2
                assert router.metric("tokenizer_reconnects_total") >= 1
    finally:
        for process in (tokenizer, *again):
            process.kill()


def test_router_process_is_small_and_knows_neither_torch_nor_transformers() -> None:
    with backend_process() as (_, backend):
        router = stack.start("router", "--tokenizer", tokenizer_address(), "--backend", backend, forked=False)
        try:
            stack.wait_serving(router.address, router)
            process = psutil.Process(router.popen.pid)
            assert process.memory_info().rss < 120e6
            loaded = {Path(region.path).name for region in process.memory_maps()}
            assert not [name for name in loaded if "torch" in name or "tokenizers" in name]
            assert router.terminate() == 0
        finally:
            router.kill()
