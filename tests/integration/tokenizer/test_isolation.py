"""Limits of one request's cost for others: large prompts, endless templates, dying processes, and memory at rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.models.tokenizer_folders import byte_fallback_tokenizer, write_folder
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.checkpoint import demo_folder
from penstock.common.child_io import Child
from penstock.common.config import TransportConfig
from penstock.common.errors import ResourceExhausted, StartupError, from_rpc_error
from penstock.serving.grpc_options import channel_options
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.chat_template import Conversation
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.load_bundle import load_in_child
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc
from prometheus_client import CollectorRegistry

pytestmark = pytest.mark.asyncio(loop_scope="module")
HUGE = "The quick brown fox, 你好世界 don't 12345\n" * 5_000  # 190 k characters
GREEDY = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'grow' %}{{ messages[0].content * 2000000000 }}"
    "{% elif messages[0].content == 'raise' %}{{ raise_exception('No such thing.') }}"
    "{% elif messages[0].content == 'quote' %}{{ raise_exception('You said ' + messages[0].content) }}"
    "{% endif %}{{ messages[0].content }}"
)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Any, TokenizerApp, grpc.aio.Channel]]:
    # A request that a busy machine makes slow must not be refused.
    config = TokenizerConfig(**{"template_processes": 1, "template_timeout_seconds": 60.0, **options})
    registry = CollectorRegistry()
    app = TokenizerApp(config, registry)
    options_of_channel = channel_options(TransportConfig())
    async with (
        serve_in_process(app, config, registry) as server,
        grpc.aio.insecure_channel(server.address, options=options_of_channel) as channel,
    ):
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel), app, channel


def chat(content: str) -> pb.ApplyChatTemplateRequest:
    return pb.ApplyChatTemplateRequest(messages=[pb.Message(role="user", content=content)])


async def refusal_of(call: Awaitable[Any]) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("rpc", ["Encode", "ApplyChatTemplate"])
async def test_large_prompts_do_not_delay_small_requests_or_health(rpc: str) -> None:
    async with serving(max_text_bytes=8 << 20) as (stub, _, channel):
        health = health_pb2_grpc.HealthStub(channel)
        small = 0
        # Behind a large prompt in a queue, or with the event loop held, it would be one or two, however often it is
        # tried; on a busy machine it may be so few once.
        for _ in range(10):
            if rpc == "Encode":
                large = [stub.Encode(pb.EncodeRequest(texts=[HUGE] * 4)) for _ in range(2)]
            else:
                large = [stub.ApplyChatTemplate(chat(HUGE * 3)) for _ in range(2)]
            small = max(small, await small_ones_during(asyncio.gather(*large), stub, health))
            if small >= 8:
                break
        assert small >= 8


async def small_ones_during(large: asyncio.Future[Any], stub: Any, health: Any) -> int:
    """Count answers to small requests while `large` is not done."""
    small = 0
    while not large.done():
        encoded = await stub.Encode(pb.EncodeRequest(texts=["small"]))
        rendered = await stub.ApplyChatTemplate(chat("small"))
        status = await health.Check(health_pb2.HealthCheckRequest())
        assert encoded.encodings[0].ids
        assert rendered.token_ids
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        small += not large.done()
    await large
    return small


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def greedy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, TokenizerApp]]:
    """Run a service with one template process, and a template that takes as much as a message asks for."""
    folder = write_folder(tmp_path_factory.mktemp("greedy"), byte_fallback_tokenizer(), {}, GREEDY)
    async with serving(model=str(folder)) as (stub, app, _):
        yield stub, app


async def test_a_template_over_its_memory_is_killed_and_the_service_goes_on(greedy: tuple[Any, TokenizerApp]) -> None:
    stub, app = greedy
    before = app.service.pool.pids
    error = await refusal_of(stub.ApplyChatTemplate(chat("grow")))
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "TEMPLATE_MEMORY_LIMIT"
    assert (await stub.ApplyChatTemplate(chat("hello"))).text == "hello"
    assert set(app.service.pool.pids).isdisjoint(before)


async def test_a_template_over_its_time_is_killed_and_the_service_goes_on(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_fallback_tokenizer(), {}, GREEDY)
    async with serving(model=str(folder), template_timeout_seconds=1.0) as (stub, app, _):
        before = app.service.pool.pids
        error = await refusal_of(stub.ApplyChatTemplate(chat("loop")))
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "TEMPLATE_TIME_LIMIT"
        text = ""
        while not text:  # which may take a busy machine its second, too
            try:
                text = (await stub.ApplyChatTemplate(chat("hello"))).text
            except grpc.aio.AioRpcError as late:
                if from_rpc_error(late).reason != "TEMPLATE_TIME_LIMIT":
                    raise
        assert text == "hello"
        assert set(app.service.pool.pids).isdisjoint(before)


async def test_what_a_process_was_given_behind_one_that_took_too_much_is_rendered_by_another(
    greedy: tuple[Any, TokenizerApp],
) -> None:
    stub, app = greedy
    (before,) = app.service.pool.pids
    overrun = asyncio.ensure_future(refusal_of(stub.ApplyChatTemplate(chat("grow"))))
    others = [stub.ApplyChatTemplate(chat(f"hello {number}")) for number in range(6)]
    texts = [answer.text for answer in await asyncio.gather(*others)]
    assert texts == [f"hello {number}" for number in range(6)]
    assert isinstance(await overrun, ResourceExhausted)
    assert before not in app.service.pool.pids


async def given_to_a_stopped_process(app: TokenizerApp) -> list[asyncio.Task[str]]:
    """Three conversations, "0" to "2", that the only process has been given and does not answer."""
    service = app.service
    (pid,) = service.pool.pids
    os.kill(pid, signal.SIGSTOP)

    async def render(content: str) -> str:
        request = service.templates.request(Conversation([{"role": "user", "content": content}]))
        return service.templates.result(request, await service.pool.render(request)).text

    answers = [asyncio.create_task(render(f"{number}")) for number in range(3)]
    # One turn, in which they are all given to the process.
    await asyncio.sleep(0)
    assert service.pool.queued == 0
    return answers


async def test_what_a_process_was_given_behind_one_that_ran_too_long_is_rendered_by_another(
    greedy: tuple[Any, TokenizerApp],
) -> None:
    _, app = greedy
    first, *others = await given_to_a_stopped_process(app)
    (worker,) = app.service.pool._workers
    assert worker.timer is not None
    worker.timer.cancel()
    app.service.pool._overran(worker)  # as the timer does
    with pytest.raises(ResourceExhausted) as raised:
        await first
    assert raised.value.reason == "TEMPLATE_TIME_LIMIT"
    assert await asyncio.gather(*others) == ["1", "2"]


async def test_what_a_process_was_given_when_it_died_is_rendered_by_another(greedy: tuple[Any, TokenizerApp]) -> None:
    _, app = greedy
    (pid,) = app.service.pool.pids
    answers = await given_to_a_stopped_process(app)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*answers) == ["0", "1", "2"]


async def test_a_refusal_quotes_the_template_and_never_the_messages(greedy: tuple[Any, TokenizerApp]) -> None:
    stub, _ = greedy
    refused = await refusal_of(stub.ApplyChatTemplate(chat("raise")))
    assert refused.field == "messages"
    assert "No such thing." in refused.message
    assert "You said" not in (await refusal_of(stub.ApplyChatTemplate(chat("quote")))).message


async def test_a_template_process_that_dies_is_replaced_unnoticed(greedy: tuple[Any, TokenizerApp]) -> None:
    stub, app = greedy
    (pid,) = app.service.pool.pids
    os.kill(pid, signal.SIGKILL)
    assert (await stub.ApplyChatTemplate(chat("hello"))).text == "hello"
    assert pid not in app.service.pool.pids


async def test_the_process_that_loads_is_the_first_one_of_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, started = Child.spawn, []

    async def spawn_known(module: str, environment: dict[str, str]) -> Child:
        child = await spawn(module, environment)
        started.append((module.rpartition(".")[2], child.pid))
        return child

    monkeypatch.setattr(Child, "spawn", spawn_known)
    async with serving(template_processes=2) as (stub, app, _):
        await app.service.pool.wait_complete()
        assert [module for module, _ in started] == ["load_process", "template_process"]
        assert app.service.pool.pids == [pid for _, pid in started]
        assert (await stub.ApplyChatTemplate(chat("hello"))).text


async def test_a_process_that_ended_when_it_had_loaded_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load_and_die(folder: Path, **options: Any) -> tuple[TokenizerBundle, Child]:
        bundle, child = await load_in_child(folder, **options)
        os.kill(child.pid, signal.SIGKILL)
        await child.ended
        return bundle, child

    monkeypatch.setattr("penstock.tokenizer.service.load_in_child", load_and_die)
    async with serving() as (stub, app, _):
        assert (await stub.ApplyChatTemplate(chat("hello"))).text
        assert len(app.service.pool.pids) == 1


async def test_a_load_that_is_given_up_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, started = Child.spawn, []

    async def spawn_known(module: str, environment: dict[str, str]) -> Child:
        started.append(await spawn(module, environment))
        return started[-1]

    monkeypatch.setattr(Child, "spawn", spawn_known)
    monkeypatch.setattr("penstock.tokenizer.service.ChatTemplates", 1)
    with pytest.raises(TypeError):
        async with serving():
            pass
    (child,) = started
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_template_process_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tokenizer.template_pool.RESTART_SECONDS", 0.01)
    spawn, tries = Child.spawn, 0

    async def spawn_late(module: str, environment: dict[str, str]) -> Child:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BlockingIOError("no process now")
        child = await spawn(module, environment)
        if tries == 2:
            os.kill(child.pid, signal.SIGKILL)
        return child

    async with serving() as (stub, app, _):
        monkeypatch.setattr(Child, "spawn", spawn_late)
        (pid,) = app.service.pool.pids
        os.kill(pid, signal.SIGKILL)
        assert (await stub.ApplyChatTemplate(chat("hello"))).token_ids
        assert tries == 3
        assert len(app.service.pool.pids) == 1


async def test_a_caller_that_gives_up_leaves_no_answer_behind(greedy: tuple[Any, TokenizerApp]) -> None:
    stub, _ = greedy
    for _ in range(5):
        abandoned = stub.ApplyChatTemplate(chat("hello " * 2000))
        kept = stub.ApplyChatTemplate(chat("kept"))
        abandoned.cancel()
        assert (await kept).text == "kept"


async def test_signals_to_the_terminals_group_do_not_reach_template_processes(greedy: tuple[Any, TokenizerApp]) -> None:
    _, app = greedy
    for pid in app.service.pool.pids:
        assert os.getpgid(pid) != os.getpgid(0)


async def test_closing_leaves_no_process() -> None:
    async with serving() as (_, app, _channel):
        pids = app.service.pool.pids
        assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def broken(folder: Path, name: str, content: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes((demo_folder() / "tokenizer.json").read_bytes())
    (folder / name).write_text(content, encoding="latin-1")
    return folder


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("chat_template.jinja", "{% if %}", "chat template 'default'"),
        ("additional_chat_templates/tools.jinja", "\xe9", "tools.jinja"),
        ("chat_template.jinja", "{{ " + 5000 * "(" + "1" + 5000 * ")" + " }}", "nested too deeply"),
    ],
)
async def test_a_broken_folder_is_one_clear_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    with pytest.raises(StartupError) as raised:
        async with serving(model=str(broken(tmp_path / "broken", name, content))):
            pass
    assert says in raised.value.message
    assert "MODEL" in raised.value.message
    assert raised.value.flag == "MODEL"
    assert "\n" not in raised.value.message


async def test_a_folder_without_a_tokenizer_says_which_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        async with serving(model=str(tmp_path)):
            pass


async def test_a_vocabulary_with_holes_is_served(tmp_path: Path) -> None:
    tokenizer = json.loads((demo_folder() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[next(text for text, index in vocabulary.items() if index == 4000)] = 9000
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 5, 1e3]}')
    async with serving(model=str(tmp_path)) as (stub, _, _channel):
        assert (await stub.Decode(pb.DecodeRequest(sequences=[{"ids": [9000]}]))).texts[0]
        assert 5 in (await stub.GetTokenizer(pb.GetTokenizerRequest())).eos_token_ids


async def test_a_vocabulary_beyond_all_memory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="3000000000 ids"):
        async with serving(model=str(broken(tmp_path / "broken", "config.json", '{"vocab_size": 3000000000}'))):
            pass


AT_REST = """
import asyncio, sys
import psutil
from prometheus_client import CollectorRegistry
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.common.child_io import Child
from penstock.tokenizer.config import TokenizerConfig

async def main():
    config, registry = TokenizerConfig(), CollectorRegistry()
    app = TokenizerApp(config, registry)
    async with serve_in_process(app, config, registry):
        await app.service.pool.wait_complete()
        me = psutil.Process()
        family = [me, *me.children(recursive=True)]
        print(sum(process.memory_info().rss for process in family) >> 20, len(family))
        print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))

asyncio.run(main())
"""


async def test_at_rest_it_holds_no_torch_and_little_memory() -> None:
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", AT_REST, stdout=subprocess.PIPE)
    output, _ = await run.communicate()
    memory, modules = output.decode().splitlines()[-2:]
    megabytes, processes = map(int, memory.split())
    assert modules == "[]"
    assert processes == 3
    assert megabytes <= 300
