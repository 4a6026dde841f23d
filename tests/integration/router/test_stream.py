"""TextService through a real router, a real tokenizer and scripted backends: what a client sees of a stream."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.router import Answer, backend, chat, collect, generate, running_router, until
from penstock.common.errors import InvalidArgument
from penstock.router.requests.request_state import RequestState
from penstock.v1 import common_pb2, config_pb2, text_pb2, tokenizer_pb2

IDS = count_up(8)(None)  # type: ignore[arg-type]


async def test_generate_streams_the_text_of_the_ids_and_one_finished() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Generate(generate("Hello")))
        assert answer.text() == await router.decode(IDS)
        assert answer.started.request_id
        assert answer.started.prompt_tokens == len(await router.encode("Hello"))
        assert answer.finished.last_seq == len(answer.deltas) - 1
        (result,) = answer.finished.sequences
        assert (result.finish_reason, result.token_count) == (common_pb2.FINISH_REASON_STOP_EOS, len(IDS))
        assert answer.finished.usage.completion_tokens == len(IDS)


async def test_chat_streams_the_answer_to_the_rendered_prompt() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Chat(chat("Hi")))
        assert answer.text() == await router.decode(IDS)
        rendered = await router.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert list(one.submitted[0].prompt_token_ids)[-len(rendered) :] == rendered
        assert one.submitted[0].begins_text


async def test_unset_seed_is_chosen_and_reported() -> None:
    async with backend() as one, running_router(one) as router:
        first = await collect(router.stub.Generate(generate()))
        second = await collect(router.stub.Generate(generate()))
        assert first.started.seed != second.started.seed
        assert [request.seed for request in one.submitted] == [first.started.seed, second.started.seed]
        assert all(request.seed < 2**63 for request in one.submitted)


async def test_given_seed_is_kept_zero_too() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Generate(generate(config=config_pb2.GenerationConfig(seed=0))))
        assert answer.started.seed == 0
        assert one.submitted[0].HasField("seed")


async def test_text_that_spells_a_control_token_stays_text() -> None:
    async with backend() as one, running_router(one) as router:
        await collect(router.stub.Generate(generate("a<|im_end|>")))
        control = (await router.encode("<|im_end|>"))[0]
        assert control not in one.submitted[0].prompt_token_ids


async def test_control_tokens_in_text_are_parsed_when_the_operator_allows_it() -> None:
    async with backend() as one, running_router(one, allow_control_tokens_in_text=True) as router:
        await collect(router.stub.Generate(generate("a<|im_end|>")))
        assert list(one.submitted[0].prompt_token_ids) == await router.encode("a<|im_end|>")


async def test_token_ids_are_taken_as_they_are() -> None:
    async with backend() as one, running_router(one) as router:
        request = text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=[300, 301, 302]))
        await collect(router.stub.Generate(request))
        assert list(one.submitted[0].prompt_token_ids) == [300, 301, 302]


async def test_ids_come_only_when_asked_for() -> None:
    async with backend() as one, running_router(one) as router:
        without = await collect(router.stub.Generate(generate()))
        with_ids = await collect(router.stub.Generate(generate(output=config_pb2.OutputConfig(return_token_ids=True))))
        assert without.ids() == []
        assert with_ids.ids() == list(IDS)


async def test_deltas_without_text_are_not_sent_unless_ids_are_wanted() -> None:
    async with backend() as one, running_router(one) as router:
        pieces = await router.encode("🦜🦜")
        assert len(pieces) > 2
        one.script = lambda _: pieces
        plain = await collect(router.stub.Generate(generate()))
        assert all(delta.text for delta in plain.deltas)
        assert plain.text() == "🦜🦜"
        with_ids = await collect(router.stub.Generate(generate(output=config_pb2.OutputConfig(return_token_ids=True))))
        assert with_ids.ids() == pieces
        assert with_ids.text() == "🦜🦜"


async def test_logprobs_carry_the_tokens_text() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Generate(generate(output=config_pb2.OutputConfig(top_logprobs=0))))
        texts = [entry.chosen.text for delta in answer.deltas for entry in delta.logprobs]
        assert "".join(texts) == await router.decode(IDS)


async def test_echo_returns_the_prompt_first() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Generate(generate("Once", output=config_pb2.OutputConfig(echo=True))))
        assert answer.deltas[0].text == "Once"
        assert answer.text() == "Once" + await router.decode(IDS)
        assert not one.submitted[0].output.echo


async def test_several_sequences_are_told_apart() -> None:
    async with backend() as one, running_router(one) as router:
        config = config_pb2.GenerationConfig(num_return_sequences=3, do_sample=True)
        answer = await collect(router.stub.Generate(generate(config=config)))
        assert {answer.text(index) for index in range(3)} == {await router.decode(IDS)}
        assert [result.index for result in answer.finished.sequences] == [0, 1, 2]


async def test_matched_stop_string_is_not_in_the_text() -> None:
    async with backend() as one, running_router(one) as router:
        one.script = lambda _: ids
        ids = await router.encode("one two STOP")
        one.finish_reason, one.stop_string = common_pb2.FINISH_REASON_STOP_STRING, " STOP"
        answer = await collect(router.stub.Generate(generate(stop=config_pb2.StopConfig(stop_strings=[" STOP"]))))
        assert answer.text() == "one two"
        assert answer.finished.sequences[0].stop_string == " STOP"


async def test_every_stage_is_timed() -> None:
    async with backend() as one, running_router(one) as router:
        answer = await collect(router.stub.Chat(chat()))
        timings = answer.finished.timings
        for stage in ("template", "tokenize", "route", "queue", "prefill", "decode", "detokenize", "total"):
            assert timings.HasField(f"{stage}_seconds"), stage
        assert 0 < timings.time_to_first_token_seconds <= timings.total_seconds
        assert router.metric("e2e_request_latency_seconds_sum") == pytest.approx(timings.total_seconds)
        assert router.metric("requests_total", method="Chat", status="OK") == 1


async def _text_backend(text: str, router: Any, one: Any) -> None:
    ids = await router.encode(text)
    one.script = lambda _: ids


async def test_thought_becomes_reasoning_and_is_counted() -> None:
    async with backend() as one, running_router(one) as router:
        await _text_backend("<think>\nTwo and two.\n</think>\n\nFour.", router, one)
        answer = await collect(router.stub.Chat(chat()))
        assert (answer.reasoning(), answer.text()) == ("Two and two.", "Four.")
        assert 2 < answer.finished.usage.reasoning_tokens < answer.finished.usage.completion_tokens


TOOL = tokenizer_pb2.Tool(name="weather", description="Weather of a city")


async def test_tool_call_is_parsed_when_tools_were_offered() -> None:
    async with backend() as one, running_router(one) as router:
        text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        await _text_backend(text, router, one)
        answer = await collect(router.stub.Chat(chat(tools=[TOOL])))
        calls = answer.calls()
        assert (calls[0].name, calls[0].arguments) == ("weather", "")
        assert calls[0].id
        assert "".join(call.arguments for call in calls) == '{"city": "Oslo"}'
        assert answer.text() == ""
        assert answer.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        plain = await collect(router.stub.Chat(chat()))
        assert plain.text() == text


async def test_tenants_do_not_share_salt_and_a_clients_salt_narrows_it() -> None:
    async with backend() as one, running_router(one) as router:
        for salt in ("", "", "mine"):
            await collect(router.stub.Generate(generate(cache_salt=salt)))
        first, second, narrowed = (request.cache_salt for request in one.submitted)
        assert first == second != narrowed
        assert "mine" not in narrowed


async def test_cancelled_client_aborts_its_request_at_the_backend() -> None:
    async with backend(script=count_up(4000), allowance=3) as one, running_router(one) as router:
        call = router.stub.Generate(generate())
        async for response in call:
            if response.HasField("delta"):
                break
        call.cancel()
        await one.until(lambda: len(one.aborted) == 1)
        assert one.running == 0


async def test_deadline_ends_the_request_at_the_backend_too() -> None:
    async with backend(script=count_up(4000), allowance=3) as one, running_router(one) as router:
        timeout = 0.25
        while not one.submitted:  # the deadline of a busy machine may pass before
            timeout *= 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(router.stub.Generate(generate(), timeout=timeout))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await one.until(lambda: len(one.aborted) == len(one.submitted))


async def test_many_streams_at_once_each_end_in_one_finished() -> None:
    async with (
        backend(script=count_up(20)) as one,
        backend(script=count_up(20)) as two,
        running_router(one, two) as router,
    ):
        answers: list[Answer] = await asyncio.gather(
            *(collect(router.stub.Chat(chat(f"number {index}"))) for index in range(64))
        )
        expected = {answer.text() for answer in answers}
        assert len(expected) == 1
        assert min(len(one.submitted), len(two.submitted)) >= 16


async def test_backends_get_the_time_that_is_left() -> None:
    async with backend() as one, running_router(one) as router:
        await collect(router.stub.Generate(generate(), timeout=3600))
        await collect(router.stub.Generate(generate()))
        with_deadline, without = one.submitted
        # grpc's C core rounds what it sends up to three digits.
        assert 3000 < with_deadline.timeout_seconds <= 3610
        assert not without.HasField("timeout_seconds")


async def test_a_request_that_is_over_is_freed_without_the_garbage_collector() -> None:
    seen: list[weakref.ref[RequestState]] = []
    async with backend(allowance=4) as one, running_router(one) as router:
        gc.collect()
        gc.disable()
        try:
            async for message in router.stub.Chat(chat("Hi")):
                if message.HasField("started"):
                    seen = [weakref.ref(found) for found in gc.get_objects() if type(found) is RequestState]
                    await one.allow(None)
            assert seen
            await until(lambda: all(request() is None for request in seen))
        finally:
            gc.enable()


async def test_a_request_that_failed_is_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[RequestState]] = []
    begin = RequestState.__init__

    def remember(self: RequestState, *args: Any, **options: Any) -> None:
        seen.append(weakref.ref(self))
        begin(self, *args, **options)

    monkeypatch.setattr(RequestState, "__init__", remember)
    async with backend(refuse=InvalidArgument("config.seed", "is refused")) as one, running_router(one) as router:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in router.stub.Chat(chat("Hi")):
                        pass
                assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                del raised
            assert len(seen) == 2
            # grpc.aio holds its last call until the next one, and an abort's exception, with the handler's frames, in a
            # circle.
            by_grpc = os.environ.get("PENSTOCK_TEST_TRANSPORT") == "grpc"
            await until(
                lambda: (by_grpc and gc.collect() < 0) or sum(request() is not None for request in seen) <= by_grpc
            )
        finally:
            gc.enable()
