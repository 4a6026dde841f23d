"""Tool calls through a real router and gateway: the format that is chosen, special markers, forced calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest
from factories.engine.grammars import accepts, compiled_around
from factories.servers.gateway import running_gateway
from factories.servers.router import Router, backend, running_router
from google.protobuf import struct_pb2
from penstock.generation.wire.convert import to_constraint
from penstock.v1 import common_pb2, config_pb2, generation_pb2, text_pb2, tokenizer_pb2

CALL = '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'


class Writer:
    """Script of a backend that writes a text, once its ids are known."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    async def write(self, router: Router, text: str) -> None:
        self.ids = await router.encode(text)

    def __call__(self, _: generation_pb2.GenerateRequest) -> Sequence[int]:
        return self.ids


def request(**fields: Any) -> text_pb2.ChatRequest:
    parameters = struct_pb2.Struct()
    parameters.update({"type": "object", "properties": {"city": {"type": "string"}}})
    return text_pb2.ChatRequest(
        messages=[tokenizer_pb2.Message(role="user", content="Weather?")],
        tools=[tokenizer_pb2.Tool(name="get_weather", parameters=parameters)],
        **fields,
    )


async def answered(router: Router, asked: text_pb2.ChatRequest) -> tuple[str, list[tuple[str, str]], str]:
    """Return (text, calls, finish reason)."""
    text, reason = "", ""
    calls: dict[int, tuple[str, str]] = {}
    async for response in router.stub.Chat(asked):
        text += response.delta.text
        for call in response.delta.tool_calls:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + call.name, arguments + call.arguments)
        for result in response.finished.sequences:
            reason = common_pb2.FinishReason.Name(result.finish_reason)
    return text, list(calls.values()), reason


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_option_chooses_the_format(tokens_per_step: int) -> None:
    script = Writer()
    async with (
        backend(script=script, tokens_per_step=tokens_per_step) as served,
        running_router(served, tool_format="mistral") as router,
    ):
        await script.write(router, "Well." + CALL)
        text, calls, _ = await answered(router, request())
        assert (text, calls) == ("Well.", [("get_weather", '{"city": "Oslo"}')])


async def test_template_chooses_the_format() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served) as router:
        await script.write(
            router, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        )
        text, calls, reason = await answered(router, request())
        assert reason == "FINISH_REASON_TOOL_CALLS"
        assert (text, calls) == ("", [("get_weather", '{"city": "Oslo"}')])


async def test_call_that_is_cut_off_stays_partial_and_a_broken_one_is_text() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served, tool_format="mistral") as router:
        await script.write(router, CALL[:-4])
        assert (await answered(router, request()))[:2] == ("", [("get_weather", '{"city": "Os')])
        await script.write(router, "[TOOL_CALLS][not json]")
        assert (await answered(router, request()))[:2] == ("[TOOL_CALLS][not json]", [])


async def test_forced_choice_reaches_the_backend_as_a_grammar() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served, tool_format="glm4") as router:
        await script.write(router, "<tool_call>get_weather\n</tool_call>")
        await answered(router, request(tool_choice=text_pb2.ToolChoice(required=True)))
        grammar = served.submitted[-1].constraint.grammar
        assert grammar.startswith("start:")
        assert "<arg_key>city</arg_key>" in grammar
        await answered(router, request(tool_choice=text_pb2.ToolChoice(none=True)))
        assert not served.submitted[-1].HasField("constraint")


async def test_calls_by_choice_reach_the_backend_as_a_grammar_from_their_marker_on() -> None:
    async with backend(script=Writer()) as served, running_router(served, tool_format="glm4") as router:
        asked = request()
        await answered(router, asked)
        calls = served.submitted[-1].calls
        assert list(calls.opens) == ["<tool_call>"]
        assert "get_weather" in calls.grammar
        # Parameters of any name, unless the tool is strict.
        assert "<arg_key>city" not in calls.grammar
        asked.tools[0].strict = True
        await answered(router, asked)
        assert "<arg_key>city" in served.submitted[-1].calls.grammar
        free: list[dict[str, Any]] = [
            {"tool_choice": text_pb2.ToolChoice(none=True)},
            {"tool_choice": text_pb2.ToolChoice(required=True)},
        ]
        for fields in free:
            await answered(router, request(**fields))
            assert not served.submitted[-1].HasField("calls")


async def test_a_constraint_leaves_room_for_calls() -> None:
    """Agents send tools and a schema for the last answer together: the constraint was about every answer."""
    script, constraint = Writer(), config_pb2.Constraint(json_object=True)
    async with backend(script=script) as served, running_router(served, tool_format="mistral") as router:
        # A vocabulary without [ARGS] has the older form.
        call = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
        for text, found in ((call, ("", [("get_weather", '{"city": "Oslo"}')])), ('{"a": 1}', ('{"a": 1}', []))):
            await script.write(router, text)
            assert (await answered(router, request(constraint=constraint)))[:2] == found
            submitted = served.submitted[-1]
            assert submitted.constraint == constraint
            grammar = compiled_around(
                replace(to_constraint(submitted.constraint), may_be_calls=True), submitted.calls.beside_answer
            )
            assert accepts(grammar, text)
        assert not accepts(grammar, "It rains.")
        # Without a choice of calls the answer is all.
        await answered(router, request(constraint=constraint, tool_choice=text_pb2.ToolChoice(none=True)))
        assert not served.submitted[-1].HasField("calls")


async def test_calls_that_are_forced_need_no_constraint() -> None:
    script, constraint = Writer(), config_pb2.Constraint(json_object=True)
    async with backend(script=script) as served, running_router(served, tool_format="mistral") as router:
        await script.write(router, CALL)
        asked = request(constraint=constraint, tool_choice=text_pb2.ToolChoice(required=True))
        assert (await answered(router, asked))[1] == [("get_weather", '{"city": "Oslo"}')]
        assert served.submitted[-1].constraint.grammar
        events = [event async for event in router.stub.Chat(asked)]
        assert any("constraint has no effect" in one for one in events[0].started.warnings)


async def test_calls_are_left_to_the_model_where_the_router_is_told_to() -> None:
    async with backend(script=Writer()) as served, running_router(served, hold_tool_calls=False) as router:
        await answered(router, request())
        assert not served.submitted[-1].HasField("calls")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": text_pb2.ToolChoice(function="other")}, "tool_choice.function"),
        ({"tool_choice": text_pb2.ToolChoice(required=True), "continue_final_message": True}, "tool_choice"),
    ],
)
async def test_choice_that_cannot_be_is_refused(fields: dict[str, Any], field: str) -> None:
    async with backend() as served, running_router(served) as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answered(router, request(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(f"{field}:")


async def test_gateway_gives_the_calls_of_the_format_whole_and_as_events() -> None:
    script = Writer()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    async with (
        backend(script=script) as served,
        # A token a piece, however late the loop is.
        running_router(served, tool_format="mistral", max_gather_seconds=0.0) as router,
        running_gateway(router.server.address) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        await script.write(router, CALL)
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
        pieces = [
            call.function
            async for chunk in await client.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        assert pieces[0].name == "get_weather"
        assert len(pieces) > 2, "arguments come in pieces"
        assert "".join(piece.arguments or "" for piece in pieces) == '{"city": "Oslo"}'


@pytest.mark.parametrize("tokens_per_step", [1, 4, 64])
async def test_openai_stream_accumulates_the_calls(tokens_per_step: int) -> None:
    script = Writer()
    properties = {"city": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    # The oldest client of the range accumulates strict tools alone.
    tool = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": schema}}
    asked: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    async with (
        backend(script=script, tokens_per_step=tokens_per_step) as served,
        running_router(served, tool_format="mistral") as router,
        running_gateway(router.server.address) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        await script.write(router, f"{CALL}{CALL.replace('Oslo', 'Bergen')}")
        async with client.chat.completions.stream(**asked) as stream:
            deltas = [event.chunk async for event in stream if event.type == "chunk"]
            whole = await stream.get_final_completion()
        for chunk in deltas:
            indexes = [call.index for choice in chunk.choices for call in choice.delta.tool_calls or ()]
            assert len(indexes) == len(set(indexes)), "one entry for each call"
        calls = [(call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls or ()]
        assert calls == [("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Bergen"}')]


async def test_call_that_the_limit_cuts_leaves_no_text() -> None:
    script = Writer()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with backend(script=script) as served, running_router(served) as router:
        await script.write(router, f"{call}\n{call}")
        whole = len(script.ids)
        found = []
        for limit in range(1, whole):
            asked = request(config=config_pb2.GenerationConfig(max_new_tokens=limit))
            text, calls, reason = await answered(router, asked)
            assert reason == "FINISH_REASON_LENGTH"
            found.append((text.strip(), len(calls)))
        assert {text for text, _ in found} == {""}
        assert {number for _, number in found} == {0, 1, 2}


async def test_call_in_a_thought_that_nothing_ends_is_a_call() -> None:
    script = Writer()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with backend(script=script) as served, running_router(served) as router:
        await script.write(router, f"<think>\nI look.\n{call}<|im_end|>")
        text, calls, reason = await answered(router, request())
        assert (text, calls, reason) == ("", [("get_weather", '{"city": "Oslo"}')], "FINISH_REASON_TOOL_CALLS")
        await script.write(router, f"<think>\nI look.\n{call}\n</think>Yes.<|im_end|>")
        assert (await answered(router, request()))[:2] == ("Yes.", [])


def hermes(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


FORCED = text_pb2.ToolChoice(required=True)
OSLO, BERGEN = ("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Bergen"}')


@pytest.mark.parametrize("tokens_per_step", [1, 6])
async def test_forced_call_is_not_made_twice_and_ends_the_answer(tokens_per_step: int) -> None:
    script = Writer()
    async with (
        backend(script=script, tokens_per_step=tokens_per_step) as served,
        running_router(served) as router,
    ):
        # As a model that cannot stop writes them; nothing bounds its tokens.
        await script.write(router, "\n".join([hermes("Oslo"), hermes("Bergen"), *[hermes("Oslo")] * 500]))
        text, calls, reason = await answered(router, request(tool_choice=FORCED))
        assert (text, calls, reason) == ("", [OSLO, BERGEN], "FINISH_REASON_TOOL_CALLS")
        await served.until(lambda: served.running == 0)
        several = request(tool_choice=FORCED, config=config_pb2.GenerationConfig(num_return_sequences=2))
        found: dict[int, set[int]] = {}
        async for response in router.stub.Chat(several):
            for call in response.delta.tool_calls:
                found.setdefault(response.delta.index, set()).add(call.index)
            usage = response.finished.usage
        assert found == {0: {0, 1}, 1: {0, 1}}
        assert 0 < usage.completion_tokens < 2 * len(script.ids)
        await served.until(lambda: served.running == 0)


async def test_call_that_only_begins_like_an_earlier_one_is_made() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served) as router:
        await script.write(router, f"{hermes('Oslo')}\n{hermes('Oslo 2')}<|im_end|>")
        _, calls, reason = await answered(router, request(tool_choice=FORCED))
        assert calls == [OSLO, ("get_weather", '{"city": "Oslo 2"}')]
        assert reason == "FINISH_REASON_TOOL_CALLS"


async def test_calls_of_an_answer_are_bounded_whoever_asked_for_them() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served, max_tool_calls=3) as router:
        await script.write(router, "\n".join([hermes("Oslo")] * 500))
        # Two dice are one call twice: the model chose to make it.
        text, calls, reason = await answered(router, request())
        assert (text, calls, reason) == ("", [OSLO] * 3, "FINISH_REASON_TOOL_CALLS")
        await served.until(lambda: served.running == 0)
        await answered(router, request(tool_choice=FORCED))
        assert "{0,2}" in served.submitted[-1].constraint.grammar
        await answered(router, request(tool_choice=FORCED, parallel_tool_calls=False))
        assert "call){" not in served.submitted[-1].constraint.grammar


async def test_a_stop_string_takes_nothing_of_the_text_before_it() -> None:
    script = Writer()
    async with backend(script=script) as served, running_router(served) as router:
        served.finish_reason, served.stop_string = common_pb2.FINISH_REASON_STOP_STRING, "b"
        await script.write(router, "hello <b")
        asked = request(stop=config_pb2.StopConfig(stop_strings=["b"]))
        assert await answered(router, asked) == ("hello <", [], "FINISH_REASON_STOP_STRING")
        served.finish_reason, served.stop_string = common_pb2.FINISH_REASON_LENGTH, None
        await script.write(router, "if a <")
        assert await answered(router, request()) == ("if a <", [], "FINISH_REASON_LENGTH")


async def test_an_answer_that_is_over_ended_in_calls_whatever_cut_the_rest() -> None:
    script, call = Writer(), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with backend(script=script, tokens_per_step=500) as served, running_router(served) as router:
        served.finish_reason = common_pb2.FINISH_REASON_LENGTH
        await script.write(router, f"{call}\n{call}")
        expected = ("", [("get_weather", '{"city": "Oslo"}')], "FINISH_REASON_TOOL_CALLS")
        assert await answered(router, request(parallel_tool_calls=False)) == expected
