"""`penstock chat` and `penstock complete` against a scripted TextService."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.stack import penstock
from penstock.common.config import ServerConfig
from penstock.common.errors import InvalidArgument, trailing_metadata
from penstock.v1 import common_pb2, config_pb2, generation_pb2, text_pb2, text_pb2_grpc


class Script(text_pb2_grpc.TextServiceServicer):
    """Servicer that answers each question with `<question>!`, refuses "bad", and remembers the requests."""

    def __init__(self) -> None:
        self.chats: list[text_pb2.ChatRequest] = []
        self.texts: list[text_pb2.GenerateTextRequest] = []
        self.warnings: list[str] = []

    async def Chat(self, request: text_pb2.ChatRequest, context: Any) -> None:
        self.chats.append(request)
        asked = request.messages[-1].content
        if asked == "bad":
            error = InvalidArgument("messages", "not this one")
            await context.abort(error.code, error.message, trailing_metadata(error))
        await context.write(text_pb2.ChatResponse(started=generation_pb2.Started(request_id="r")))
        for seq, text in enumerate((asked, "!")):
            await context.write(text_pb2.ChatResponse(delta=text_pb2.ChatDelta(seq=seq, text=text)))
        await context.write(text_pb2.ChatResponse(finished=finished(2)))

    async def Generate(self, request: text_pb2.GenerateTextRequest, context: Any) -> None:
        self.texts.append(request)
        started = generation_pb2.Started(request_id="r", warnings=self.warnings)
        await context.write(text_pb2.GenerateTextResponse(started=started))
        if request.config.num_return_sequences > 1:
            for seq, (index, text) in enumerate(((1, "se"), (0, "fir"), (1, "cond"), (0, "st"))):
                delta = text_pb2.TextDelta(seq=seq, index=index, text=text)
                await context.write(text_pb2.GenerateTextResponse(delta=delta))
            await context.write(text_pb2.GenerateTextResponse(finished=finished(4)))
            return
        await context.write(text_pb2.GenerateTextResponse(delta=text_pb2.TextDelta(text="héllo 👋🏽")))
        await context.write(text_pb2.GenerateTextResponse(finished=finished(1)))


def finished(deltas: int) -> generation_pb2.Finished:
    return generation_pb2.Finished(
        sequences=[common_pb2.SequenceResult(finish_reason=common_pb2.FINISH_REASON_STOP_EOS)],
        usage=common_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3),
        timings=common_pb2.StageTimings(time_to_first_token_seconds=0.0125, decode_seconds=0.1),
        last_seq=deltas - 1,
    )


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Script, str]]:
    script, server = Script(), grpc.aio.server()
    text_pb2_grpc.add_TextServiceServicer_to_server(script, server)
    port = server.add_insecure_port(f"{ServerConfig().host}:0")
    await server.start()
    try:
        yield script, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_chat_remembers_the_conversation_until_it_is_reset() -> None:
    async with scripted() as (script, address):
        lines = ["one", "two", "bad", "/system be brief", "three", "/reset", "four", "/quit", "never"]
        code, stdout, stderr = await penstock("chat", "--address", address, stdin="\n".join(lines) + "\n")
    assert code == 1, "a question was refused, and nobody reads along"
    assert stdout.split() == ["one!", "two!", "three!", "four!"]
    assert "INVALID_ARGUMENT: messages: not this one" in stderr
    spoken = [[(message.role, message.content) for message in chat.messages] for chat in script.chats]
    assert spoken == [
        [("user", "one")],
        [("user", "one"), ("assistant", "one!"), ("user", "two")],
        [("user", "one"), ("assistant", "one!"), ("user", "two"), ("assistant", "two!"), ("user", "bad")],
        [("system", "be brief"), ("user", "three")],
        [("system", "be brief"), ("user", "four")],
    ]


async def test_a_question_is_answered_once_with_what_a_pipe_has() -> None:
    async with scripted() as (script, address):
        for question, piped in (("Why?", ""), ("Sum it up.", "a\nb\n"), ("-", "all of it\n")):
            code, stdout, stderr = await penstock("chat", question, "--address", address, "--stats", stdin=piped)
            assert code == 0
            assert "5 prompt (2 cached) + 3 tokens" in stderr
            assert "prompt" not in stdout
    spoken = [[(message.role, message.content) for message in chat.messages] for chat in script.chats]
    assert spoken == [[("user", "Why?")], [("user", "Sum it up.\n\na\nb\n")], [("user", "all of it\n")]]


async def test_a_question_that_is_refused_is_an_error_of_the_command() -> None:
    async with scripted() as (_, address):
        code, stdout, stderr = await penstock("chat", "bad", "--address", address)
    assert (code, stdout) == (1, "")
    assert "INVALID_ARGUMENT: messages: not this one" in stderr


async def test_standard_input_without_a_text_is_no_question() -> None:
    async with scripted() as (script, address):
        code, _, stderr = await penstock("chat", "-", "--address", address, stdin=" \n")
    assert (code, script.chats) == (2, [])
    assert "QUESTION is empty" in stderr


async def test_chat_shows_counts_and_timings_when_asked() -> None:
    async with scripted() as (_, address):
        code, stdout, _ = await penstock("chat", "--address", address, "--stats", stdin="hi\n")
    assert code == 0
    assert "5 prompt (2 cached) + 3 tokens · first after 12.5 ms · 20 tok/s · STOP_EOS" in stdout


async def test_complete_reads_a_pipe_and_sends_the_options_that_were_given() -> None:
    async with scripted() as (script, address):
        flags = ("--address", address, "--temperature", "0", "--stop", "a,b", "--stop", "\n", "--max-new-tokens", "7")
        code, stdout, stderr = await penstock("complete", "-", *flags, stdin="Say hello")
    assert (code, stdout, stderr) == (0, "héllo 👋🏽\n", "")
    request = script.texts[0]
    assert request.text == "Say hello"
    assert (request.config.temperature, request.config.max_new_tokens) == (0.0, 7)
    assert list(request.stop.stop_strings) == ["a,b", "\n"]
    assert not request.config.HasField("seed")


async def test_flags_reach_their_fields(tmp_path: Path) -> None:
    schema = tmp_path / "person.json"
    schema.write_text('{"type": "object"}')
    flags = [
        *("--num-beams", "4", "--early-stopping", "never", "--length-penalty", "0.5", "--dola-layers", "0,2"),
        *("--prompt-lookup-num-tokens", "3", "--guidance-scale", "1.5", "--negative-prompt", "sad", "--do-sample"),
        *("--json-schema", f"@{schema}", "--option", "bad_words_ids=[[5], [6, 7]]", "--option", "top_h=0.5"),
    ]
    async with scripted() as (script, address):
        for arguments in (("complete", "Hi"), ("chat",)):
            code, _, stderr = await penstock(*arguments, "--address", address, *flags, stdin="Hi\n")
            assert (code, stderr) == (0, "")
    for request in (script.texts[0], script.chats[0]):
        config = request.config
        assert (config.num_beams, config.length_penalty, config.top_h, config.do_sample) == (4, 0.5, 0.5, True)
        assert config.early_stopping == config_pb2.EARLY_STOPPING_NEVER
        assert list(config.dola_layers.indices.indices) == [0, 2]
        assert [list(word.ids) for word in config.bad_words_ids] == [[5], [6, 7]]
        assert (config.negative_prompt_text, config.prompt_lookup_num_tokens) == ("sad", 3)
        assert request.constraint.json_schema == '{"type": "object"}'


async def test_several_sequences_come_one_after_the_other() -> None:
    async with scripted() as (_, address):
        flags = ("--option", "num_return_sequences=2", "--do-sample")
        _, stdout, _ = await penstock("complete", "Hi", "--address", address, *flags)
    assert stdout == "first\nsecond\n"


async def test_choices_repeat() -> None:
    async with scripted() as (script, address):
        await penstock("complete", "Hi", "--address", address, "--choice", "yes, sir", "--choice", "no")
    assert list(script.texts[0].constraint.choice.values) == ["yes, sir", "no"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--option", "num_beeps=3"), "num_beeps"),
        (("--option", "top_k"), "NAME=JSON"),
        (("--option", "top_k=x"), "JSON"),
        (("--option", "top_k=-3"), "top_k"),
        (("--regex", "a", "--choice", "b"), "'regex' and 'choice' do not go together (change --regex)"),
        (("--seed", "9" * 20), "(change --seed)"),
        (("--option", "top_logprobs=[]"), "option 'top_logprobs'"),
        (("--early-stopping", "maybe"), "true, false or never"),
        (("--dola-layers", "middle"), "low, high or numbers"),
        (("--json-schema", "@/nowhere/at/all"), "cannot be read"),
    ],
)
async def test_a_wrong_flag_is_reported_before_anything_is_asked(flags: tuple[str, ...], told: str) -> None:
    async with scripted() as (script, address):
        code, stdout, stderr = await penstock("complete", "Hi", "--address", address, *flags)
    assert (code, stdout, script.texts) == (2, "", [])
    assert told in stderr


async def test_warnings_are_shown_with_the_statistics() -> None:
    async with scripted() as (script, address):
        script.warnings = ["config.top_k has no effect"]
        _, _, stderr = await penstock("complete", "Hi", "--address", address, "--stats")
    assert "warning: config.top_k has no effect" in stderr
