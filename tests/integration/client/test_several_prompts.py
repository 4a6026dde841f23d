"""`generate_many` of both clients, against a server that is scripted by the prompts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from penstock.v1 import common_pb2, generation_pb2, text_pb2, text_pb2_grpc
from penstock_client import (
    AsyncClient,
    Client,
    ClientConfig,
    Completion,
    InvalidArgument,
    ResourceExhausted,
)
from penstock_client._channel import Channel

MOST = 3


class Echo(text_pb2_grpc.TextServiceServicer):
    """Answers with the prompt. The first `together` calls wait for each other; "bad" and "full" are refused."""

    def __init__(self, together: int) -> None:
        self.lock, self.together = threading.Condition(), together
        self.calls = self.open = self.peak = 0
        self.cancelled = threading.Event()
        self.is_held = threading.Event()

    def Generate(self, request: text_pb2.GenerateTextRequest, context: Any) -> Iterator[text_pb2.GenerateTextResponse]:
        with self.lock:
            self.calls, self.open = self.calls + 1, self.open + 1
            self.peak = max(self.peak, self.open)
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: self.calls >= self.together, timeout=30)
        try:
            if request.text == "bad":
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text: is bad")
            if request.text == "full":
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            yield text_pb2.GenerateTextResponse(started=generation_pb2.Started(seed=request.config.seed))
            if request.text == "held":
                context.add_callback(self.cancelled.set)
                self.is_held.set()
                assert self.cancelled.wait(30)
                return
            text = request.text or str(list(request.token_ids.ids))
            yield text_pb2.GenerateTextResponse(delta=text_pb2.TextDelta(seq=0, text=text))
            result = common_pb2.SequenceResult(finish_reason=common_pb2.FINISH_REASON_LENGTH)
            yield text_pb2.GenerateTextResponse(finished=generation_pb2.Finished(sequences=[result]))
        finally:
            with self.lock:
                self.open -= 1


@contextmanager
def serving(together: int = MOST) -> Iterator[tuple[str, Echo]]:
    servicer = Echo(together)
    server = grpc.server(ThreadPoolExecutor(16))
    text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(None)


def ask(address: str, is_async: bool, prompts: Any, **options: Any) -> list[Completion | Exception]:
    """Ask either client."""
    config = ClientConfig(max_concurrent_prompts=MOST)
    if not is_async:
        with Client(address, config) as client:
            return list(client.generate_many(prompts, **options))

    async def run() -> list[Completion | Exception]:
        async with AsyncClient(address, config) as client:
            return [answer async for answer in client.generate_many(prompts, **options)]

    return asyncio.run(run())


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@both
def test_answers_and_errors_come_in_the_prompts_order_and_so_many_run_at_once(is_async: bool) -> None:
    prompts = ["one", [1, 2], "bad", "two", "full", *map(str, range(20))]
    with serving() as (address, servicer):
        answers = ask(address, is_async, iter(prompts), seed=7)
        assert len(answers) == len(prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            if prompt == "bad":
                assert isinstance(answer, InvalidArgument)
            elif prompt == "full":
                assert isinstance(answer, ResourceExhausted)
            else:
                assert isinstance(answer, Completion)
                assert (answer.text, answer.started.seed) == (str(prompt), 7)
        # The first calls waited for each other, so at least so many ran together.
        assert servicer.peak == MOST


@both
def test_another_number_at_once_and_no_prompt_at_all(is_async: bool) -> None:
    with serving(together=1) as (address, servicer):
        assert ask(address, is_async, []) == []
        answers = ask(address, is_async, ["a", "b", "c"], concurrency=1)
        assert [answer.text for answer in answers if isinstance(answer, Completion)] == ["a", "b", "c"]
        assert servicer.peak == 1


@both
@pytest.mark.parametrize(
    ("prompts", "options", "kind"),
    [
        ("one text", {}, TypeError),
        (["a"], {"no_such_option": 1}, TypeError),
        (["a"], {"request_id": "r"}, ValueError),
        (["a"], {"concurrency": 0}, ValueError),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(
    is_async: bool, prompts: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    with serving() as (address, servicer):
        with pytest.raises(kind):
            ask(address, is_async, prompts, **options)
        assert servicer.calls == 0


@both
def test_a_prompt_that_is_none_is_its_own_answer(is_async: bool) -> None:
    with serving(together=1) as (address, _):
        wrong, right = ask(address, is_async, [["a"], "b"])
        assert isinstance(wrong, TypeError)
        assert isinstance(right, Completion)


class Endless:
    """Prompts without an end, of which the second is held; 16 answers may wait for it when 2 are asked for at once."""

    def __init__(self) -> None:
        self.read, self.is_full = 0, threading.Event()

    def __iter__(self) -> Iterator[str]:
        for number in itertools.count():
            self.read = number
            if number == 16:
                self.is_full.set()
            yield "held" if number == 1 else "short"


async def test_prompts_without_an_end_are_read_as_there_is_room_and_leaving_cancels_the_others() -> None:
    prompts = Endless()
    with serving(together=1) as (address, servicer):
        async with AsyncClient(address) as client:
            answers = client.generate_many(prompts, concurrency=2)
            assert isinstance(await anext(answers), Completion)
            second = asyncio.ensure_future(anext(answers))
            assert await asyncio.to_thread(prompts.is_full.wait, 30)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert await asyncio.to_thread(servicer.cancelled.wait, 30)
    assert prompts.read <= 17


def test_a_loop_that_is_left_cancels_what_is_with_the_server() -> None:
    prompts = Endless()
    with serving(together=1) as (address, servicer), Client(address) as client:
        for answer in client.generate_many(prompts, concurrency=2):
            assert isinstance(answer, Completion)
            assert servicer.is_held.wait(30)
            break
        assert servicer.cancelled.wait(30)
    assert prompts.read <= 2


def test_several_prompts_for_generate_are_told_what_takes_them() -> None:
    with serving() as (address, _), Client(address) as client, pytest.raises(TypeError, match="generate_many"):
        client.generate(["one", "two"])  # type: ignore[arg-type]


async def test_a_cancelled_call_cancels_its_streams() -> None:
    with serving(together=2) as (address, servicer):
        async with AsyncClient(address) as client:
            task = asyncio.ensure_future(anext(client.generate_many(["held", "one"])))
            assert await asyncio.to_thread(servicer.is_held.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(servicer.cancelled.wait, 30)


def test_a_stream_that_opens_after_the_interruption_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    all_closed, closed, read = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def __enter__(self) -> Late:
            assert all_closed.wait(30)
            return self

        def __exit__(self, *_: object) -> None:
            closed.set()

        def result(self) -> None:
            read.set()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, **options: Any) -> None:
            if wait:
                all_closed.set()
            super().shutdown(wait, **options)

    def requests() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock_client._channel.ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        list(Channel.results(lambda _: Late(), requests(), 1))
    assert closed.is_set()
    assert not read.is_set()


def test_an_interrupted_call_ends_its_streams() -> None:
    def prompts() -> Iterator[str]:
        yield "held"
        assert servicer.is_held.wait(30)
        raise KeyboardInterrupt

    with serving(together=1) as (address, servicer), Client(address) as client:
        with pytest.raises(KeyboardInterrupt):
            list(client.generate_many(prompts(), concurrency=2))
        assert servicer.cancelled.wait(30)
