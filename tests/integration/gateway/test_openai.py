"""OpenAI's own client against `penstock serve`: its types parse every answer, and streams say what answers say."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from factories.servers.served import Served
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from penstock.v1 import tokenizer_pb2
from penstock_client import Client, InvalidArgument

pytestmark = pytest.mark.xdist_group("gateway")
QUESTION = [{"role": "user", "content": "What is Penstock?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FORCED = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"gpu": {"type": "boolean"}},
    "required": ["gpu"],
    "additionalProperties": False,
}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a streamed chat, put together as a client does it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in ChatCompletionChunk.model_validate(chunk).choices:
            made = choices.setdefault(
                choice.index, {"role": None, "content": "", "reasoning": "", "calls": {}, "logprobs": [], "end": None}
            )
            delta = choice.delta
            assert made["end"] is None, "nothing comes after the reason"
            assert (made["role"] is None) == (delta.role is not None), "the role comes once, first"
            made["role"] = made["role"] or delta.role
            made["content"] += delta.content or ""
            made["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or ():
                call = made["calls"].setdefault(piece.index, ["", "", ""])
                assert piece.function is not None
                call[0] += piece.id or ""
                call[1] += piece.function.name or ""
                call[2] += piece.function.arguments or ""
            if choice.logprobs is not None:
                made["logprobs"] += [entry.model_dump() for entry in choice.logprobs.content or ()]
            made["end"] = choice.finish_reason
    return choices


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 32},
    "answers": {"n": 3, "seed": 7, "temperature": 1.2, "max_completion_tokens": 16},
    "equal answers": {"n": 2, "temperature": 0, "max_tokens": 16, "logprobs": True},
    "logprobs": {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    "stop": {"temperature": 0, "max_tokens": 64, "stop": [" "]},
    "schema": {
        "temperature": 0,
        "max_tokens": 48,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "beams": {"num_beams": 2, "num_return_sequences": 2, "max_tokens": 8},
    "a tool": {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 96,
    },
    "no tool": {"tools": [TOOL], "tool_choice": "none", "temperature": 0, "max_tokens": 8},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "Penstock?"}]}
        ],
        "temperature": 0,
        "max_tokens": 8,
    },
}


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_a_streamed_chat_says_what_the_whole_one_says(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "model": "penstock-demo", **fields}
    whole = ChatCompletion.model_validate(served.json("/v1/chat/completions", body))
    chunks = served.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    streamed = joined(chunks)
    assert len(streamed) == len(whole.choices)
    for choice in whole.choices:
        made, message = streamed[choice.index], choice.message
        assert made["content"] == (message.content or "")
        assert made["reasoning"] == (getattr(message, "reasoning_content", None) or "")
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]
        # Ids of calls are made anew for each answer.
        assert [tuple(call[1:]) for call in made["calls"].values()] == [call[1:] for call in calls]
        assert made["end"] == choice.finish_reason
        assert [entry["token"] for entry in made["logprobs"]] == [
            entry.token for entry in (choice.logprobs.content or () if choice.logprobs else ())
        ]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert whole.usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_several_greedy_answers_are_that_of_one(served: Served) -> None:
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, "logprobs": True}
    (alone,) = served.json("/v1/chat/completions", asked)["choices"]
    several = served.json("/v1/chat/completions", {**asked, "n": 3})["choices"]
    assert [{**choice, "index": 0} for choice in several] == [alone] * 3
    texts = served.json("/v1/completions", {"prompt": "Penstock serves", "temperature": 0, "max_tokens": 8, "n": 2})
    assert len({choice["text"] for choice in texts["choices"]}) == 1


def test_the_client_streams_as_it_does_from_openai(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="penstock-demo",
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    with Client(served.grpc) as client:
        assert text == client.generate(QUESTION, max_new_tokens=24, temperature=0.0).text
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 24


def test_a_tool_call_and_its_result(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = served.client.chat.completions.create(
        model="penstock-demo",
        messages=messages,
        tools=[TOOL],
        temperature=0,
        max_tokens=96,  # type: ignore[list-item]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny"}'}]
    raw = served.client.chat.completions.with_raw_response.create(
        model="penstock-demo",
        messages=messages,
        tools=[TOOL],
        temperature=0,
        max_tokens=48,  # type: ignore[list-item]
    )
    assert raw.parse().choices[0].message.content


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "a json_object with a schema": (
        {
            "response_format": {
                "type": "json_object",
                "schema": {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]},
            }
        },
        r'\{"ok":\x20?1\}',
    ),
    "strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}},
            }
        },
        r"\{\}",
    ),
    "compact": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [{"a": [1, 2]}]}},
            },
            "structured_outputs": {"disable_any_whitespace": True},
        },
        r'\{"a":\[1,2\]\}',
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_json(served: Served, case: str) -> None:
    body, pattern = FORMS[case]
    raw = served.client.chat.completions.with_raw_response.create(
        model="penstock-demo", messages=QUESTION, temperature=0, max_tokens=32, extra_body=body
    )
    assert "x-penstock-ignored-fields" not in raw.headers
    assert re.fullmatch(pattern, raw.parse().choices[0].message.content or "")


def test_a_refused_schema_of_a_tool_names_tool_place_and_keyword(served: Served) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "x"}}}}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.chat.completions.create(
            model="penstock-demo", messages=QUESTION, tools=[tool], tool_choice="required"
        )
    assert "tool get_weather, at #/properties/city: `not` is not supported" in str(raised.value)


def test_options_of_generate_and_unknown_fields(served: Served) -> None:
    extra = {"num_beams": 2, "no_repeat_ngram_size": 2, "min_tokens": 4, "ignore_eos": True, "colour": 1, "user": "me"}
    raw = served.client.completions.with_raw_response.create(
        model="penstock-demo", prompt="Penstock has three", max_tokens=6, extra_body=extra
    )
    assert raw.headers["x-penstock-ignored-fields"] == "colour, user"
    usage = raw.parse().usage
    assert usage is not None
    assert usage.completion_tokens == 6
    with Client(served.grpc) as client:
        same = client.generate(
            "Penstock has three",
            num_beams=2,
            no_repeat_ngram_size=2,
            min_new_tokens=4,
            ignore_eos=True,
            max_new_tokens=6,
        )
    assert raw.parse().choices[0].text == same.text


@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_constraints_by_vllms_names(served: Served, field: str) -> None:
    value: Any = "(yes|no)!" if field == "guided_regex" else {"choice": ["yes!", "no!"]}
    body = {"prompt": "Is it?", "max_tokens": 8, "temperature": 0, field: value}
    assert served.json("/v1/completions", body)["choices"][0]["text"] in ("yes!", "no!")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "n": 2, "seed": 1},
        {"prompt": ["Penstock is", "The capital of"], "n": 2, "seed": 1},
    ],
    ids=["plain", "logprobs", "echo", "echo alone", "echoes alone", "prompts"],
)
def test_a_streamed_completion_says_what_the_whole_one_says(served: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": "Penstock serves", "max_tokens": 6, "ignore_eos": True, **fields}
    if "n" not in fields:
        body["temperature"] = 0
    # As the client makes it, which does not validate: a prompt's first token has no log-probability, and the type does
    # not know it.
    answer = served.json("/v1/completions", body)
    whole = Completion.construct(**answer) if "echo" in fields else Completion.model_validate(answer)
    streamed: dict[int, dict[str, Any]] = {}
    for event in served.events("/v1/completions", body):
        for choice in event["choices"]:
            made = streamed.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": [], "end": None})
            made["text"] += choice["text"]
            made["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
            made["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
            made["end"] = choice["finish_reason"]
    assert sorted(streamed) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        made = streamed[choice.index]
        assert (made["text"], made["end"]) == (choice.text, choice.finish_reason)
        assert made["tokens"] == ((choice.logprobs.tokens if choice.logprobs else None) or [])
        assert made["offsets"] == ((choice.logprobs.text_offset if choice.logprobs else None) or [])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_eval_reads_the_log_probabilities_of_a_continuation(served: Served, max_tokens: int) -> None:
    context, continuation = "The capital of France is", " Paris"
    tokens = [served.json("/tokenize", {"prompt": text})["tokens"] for text in (context, context + continuation)]
    body = {
        "prompt": [tokens[1]],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    answer = served.json("/v1/completions", body)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    begin, end = len(tokens[0]), len(found["token_logprobs"]) - max_tokens
    assert len(found["tokens"]) == len(tokens[1]) + max_tokens
    assert found["token_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == max_tokens
    scored = served.json("/v1/score", {"items": [{"prompt": context, "continuation": continuation}]})["data"][0]
    assert sum(found["token_logprobs"][begin:end]) == pytest.approx(scored["score"], abs=1e-3)
    assert "".join(found["tokens"][: len(tokens[1])]) == context + continuation
    assert found["text_offset"][begin] == len(context)
    greedy = all(
        logprob == max(top.values())
        for logprob, top in zip(found["token_logprobs"][begin:end], found["top_logprobs"][begin:end], strict=True)
    )
    assert greedy == scored["is_greedy"]


def test_an_echo_has_the_text_of_its_first_token_too(served: Served) -> None:
    text = "The capital of France is"
    ids = served.json("/tokenize", {"prompt": text})["tokens"]
    for prompt in (text, ids, [text, ids], [ids[:1]]):
        answer = served.json("/v1/completions", {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0})
        for choice in answer["choices"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == ("The" if prompt == [ids[:1]] else text)


def test_the_end_of_an_answer_is_told_as_vllm_tells_it(served: Served) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 64}
    (ended,) = served.json("/v1/chat/completions", body)["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    (stopped,) = served.json("/v1/chat/completions", {**body, "stop": ["serves"]})["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "serves")


def test_text_of_no_new_token_is_the_echo(served: Served) -> None:
    answer = served.json("/v1/completions", {"prompt": "Penstock", "max_tokens": 0, "echo": True})
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("Penstock", "length")]


def test_tokens_and_templates_agree_with_what_a_chat_reads(served: Served) -> None:
    rendered = served.json("/apply-template", {"messages": QUESTION})
    counted = served.json("/tokenize", {"messages": QUESTION})
    assert counted["tokens"] == rendered["tokens"]
    assert counted["count"] == len(rendered["tokens"])
    assert served.json("/detokenize", {"tokens": rendered["tokens"]})["prompt"] == rendered["prompt"]
    answer = served.json("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    assert answer["penstock"]["timings"]["total_seconds"] > 0


def test_embeddings_are_the_same_in_both_encodings(served: Served) -> None:
    # The client asks for base64 by itself.
    packed = served.client.embeddings.create(model="penstock-demo", input=["one", "two"])
    plain = CreateEmbeddingResponse.model_validate(
        served.json("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "float"})
    )
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-4)


def test_the_root_is_the_chat_page(served: Served) -> None:
    status, headers, body = served.ask("/")
    assert status == 200
    assert b"<title>Penstock</title>" in body
    assert "script-src 'self'" in headers["content-security-policy"]
    assert served.ask("/page/main.mjs")[0] == 200
    assert served.ask("/page/nothing.mjs")[0] == 404


def test_models_and_facts(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["penstock-demo"]
    assert isinstance(served.client.models.retrieve("penstock-demo"), Model)
    assert served.json("/health") == {"status": "ok"}
    assert served.json("/version")["version"]
    options = {row["name"]: row for row in served.json("/options")["data"]}
    assert options["temperature"]["minimum"] == 0
    assert options["early_stopping"]["choices"] == [True, False, "never"]
    assert options["do_sample"]["choices"] is None
    metrics = served.ask("/metrics")[2].decode()
    assert 'penstock_gateway_http_requests_total{route="/v1/models",status="200"}' in metrics
    assert "_created" not in metrics
    assert (served.ask("/healthz")[0], served.ask("/readyz")[0]) == (200, 200)


BAD: dict[str, tuple[str, Any, int, str | None]] = {
    # name: path, body, status, param
    "no object": ("chat", [], 400, None),
    "no messages": ("chat", {}, 400, "messages"),
    "empty messages": ("chat", {"messages": []}, 400, "messages"),
    "messages of a number": ("chat", {"messages": 5}, 400, "messages"),
    "a message of text": ("chat", {"messages": ["Hi"]}, 400, "messages[0]"),
    "no role": ("chat", {"messages": [{"content": "Hi"}]}, 400, "messages[0].role"),
    "an image": (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        400,
        "messages[0].content[0]",
    ),
    "audio": (
        "chat",
        {"messages": [*QUESTION, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "input_audio"}]}]},
        400,
        "messages[1].content[1]",
    ),
    "a call without a name": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]},
        400,
        "messages[0].tool_calls[0].function.name",
    ),
    "another model": ("chat", {"messages": QUESTION, "model": "gpt-4"}, 404, "model"),
    "another model of completions": ("text", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
    "a text for a number": ("chat", {"messages": QUESTION, "temperature": "hot"}, 400, "temperature"),
    "a number out of range": ("chat", {"messages": QUESTION, "top_p": 1.5}, 400, "top_p"),
    "a negative temperature": ("chat", {"messages": QUESTION, "temperature": -1}, 400, "temperature"),
    "negative max_tokens": ("chat", {"messages": QUESTION, "max_tokens": -1}, 400, "max_tokens"),
    "max_tokens 0": ("chat", {"messages": QUESTION, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    "n 0": ("chat", {"messages": QUESTION, "n": 0}, 400, "n"),
    "n beyond the bound": ("chat", {"messages": QUESTION, "n": 100000}, 400, "n"),
    "a stop of numbers": ("chat", {"messages": QUESTION, "stop": 3}, 400, "stop"),
    "top_logprobs alone": ("chat", {"messages": QUESTION, "top_logprobs": 2}, 400, "top_logprobs"),
    "too many top_logprobs": (
        "chat",
        {"messages": QUESTION, "logprobs": True, "top_logprobs": 99},
        400,
        "top_logprobs",
    ),
    "stream as text": ("chat", {"messages": QUESTION, "stream": "yes"}, 400, "stream"),
    "a forced call without tools": ("chat", {"messages": QUESTION, "tool_choice": "required"}, 400, "tool_choice"),
    "an unknown choice": ("chat", {"messages": QUESTION, "tools": [TOOL], "tool_choice": "all"}, 400, "tool_choice"),
    "a tool without a name": (
        "chat",
        {"messages": QUESTION, "tools": [{"type": "function", "function": {}}]},
        400,
        "tools[0].function.name",
    ),
    "an unknown format": (
        "chat",
        {"messages": QUESTION, "response_format": {"type": "xml"}},
        400,
        "response_format.type",
    ),
    "a schema that is none": (
        "chat",
        {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        400,
        "response_format.json_schema.schema",
    ),
    "two constraints": ("chat", {"messages": QUESTION, "regex": "a", "json_object": True}, 400, "json_object"),
    "tensors": ("chat", {"messages": QUESTION, "output_logits": True}, 400, "output_logits"),
    "no prompt": ("text", {}, 400, "prompt"),
    "a prompt of both": ("text", {"prompt": [1, "a"]}, 400, "prompt"),
    "an id beyond the vocabulary": ("text", {"prompt": [10_000_000]}, 400, "prompt"),
    "a prompt beyond the context": ("text", {"prompt": [5] * 9000}, 400, "prompt"),
    "logprobs beyond the bound": ("text", {"prompt": "a", "logprobs": 50}, 400, "logprobs"),
    "a suffix": ("text", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "too many prompts": ("text", {"prompt": ["a"] * 300}, 400, "prompt"),
}


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD.values(), ids=BAD)
def test_a_bad_request_gets_openais_shape(served: Served, path: str, body: Any, status: int, param: str | None) -> None:
    where = {"chat": "/v1/chat/completions", "text": "/v1/completions"}[path]
    for extra in ({}, {"stream": True}):
        asked = {**body, **{key: value for key, value in extra.items() if key not in body}} if body else body
        found, headers, text = served.ask(where, asked)
        error = json.loads(text)["error"]
        assert found == status, error
        # The engine may name an entry.
        assert (error["param"] or "").partition("[")[0] == (param or "").partition("[")[0], error
        assert error["param"] == param or param == "prompt", error
        assert headers["content-type"] == "application/json"
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        assert error["message"]
        assert error["code"]
        assert error["reason"].isupper()


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "must be a text or a list of texts"),
        ("/v1/embeddings", {"input": []}, "input", "must have between 1 and 256 entries"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]", "must be a text; token ids are not supported"),
        ("/v1/score", {}, "items", "must be a list of objects with prompt and continuation"),
        ("/v1/score", {"prompt": "a"}, "continuation", "must be a text or a list of texts"),
        ("/tokenize", {}, "prompt", "must be a text"),
        ("/detokenize", {}, "tokens", "must be a list of token ids"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "must be a text or a list of token ids"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "3"}, "max_tokens", "must be a whole number"),
        (
            *("/v1/completions", {"prompt": "a", "max_tokens": 1 << 40}, "max_tokens"),
            "must be a whole number from 0 to 4294967295",
        ),
        ("/v1/completions", {"prompt": "a", "n": -1}, "n", "must be a whole number from 0 to 4294967295"),
        ("/v1/completions", {"prompt": "a", "seed": 1 << 70}, "seed", "must be a whole number from -2^63 to 2^63 - 1"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_an_error_names_the_field_and_says_how_it_must_be(
    served: Served, path: str, body: Any, param: str, message: str
) -> None:
    status, _, text = served.ask(path, body)
    error = json.loads(text)["error"]
    assert (status, error["param"], error["message"]) == (400, param, f"{param}: {message}")


def test_openais_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        served.client.chat.completions.create(model="gpt-4", messages=QUESTION)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        served.client.chat.completions.create(model="penstock-demo", messages=QUESTION, top_p=3)  # type: ignore[arg-type]
    assert bad.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as long:
        served.client.completions.create(model="penstock-demo", prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    assert served.ask("/v1/nothing")[0] == 404
    assert served.ask("/v1/completions")[0] == 405
    assert served.ask("/v1/chat/completions", raw=b"{")[0] == 400


def test_a_constraint_leaves_the_thought_free_and_holds_for_the_answer(served: Served) -> None:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 200,
        "temperature": 0,
    }
    free = served.json("/v1/chat/completions", body)["choices"][0]["message"]
    assert free["reasoning_content"], "the model thinks"
    bound = served.json(
        "/v1/chat/completions", {**body, "regex": "[0-9]{1,3}!", "stop": [free["reasoning_content"][:4]]}
    )
    message = bound["choices"][0]["message"]
    assert message["reasoning_content"] == free["reasoning_content"]
    assert re.fullmatch("[0-9]{1,3}!", message["content"])
    off = {**body, "chat_template_kwargs": {"enable_thinking": False}, "regex": "[0-9]{1,3}!"}
    at_once = served.json("/v1/chat/completions", off)["choices"][0]["message"]
    assert "reasoning_content" not in at_once
    assert re.fullmatch("[0-9]{1,3}!", at_once["content"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_call_parses_and_holds_to_its_schema(served: Served, choice: Any) -> None:
    body = {"messages": QUESTION, "tools": [FORCED], "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    body["parallel_tool_calls"] = False
    whole = ChatCompletion.model_validate(served.json("/v1/chat/completions", body)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")
    streamed = joined(served.events("/v1/chat/completions", body))[0]
    assert [one[1:] for one in streamed["calls"].values()] == [[call.function.name, call.function.arguments]]


def test_forced_call_without_the_tool_names_the_field(served: Served) -> None:
    body = {"messages": QUESTION, "tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}
    status, _, text = served.ask("/v1/chat/completions", body)
    assert (status, json.loads(text)["error"]["param"]) == (400, "tool_choice.function")


def test_a_message_of_parts_is_its_text_over_grpc_as_well(served: Served) -> None:
    parts = [tokenizer_pb2.ContentPart(text="What is "), tokenizer_pb2.ContentPart(text="Penstock?")]
    with Client(served.grpc) as client:
        whole = client.generate(QUESTION, do_sample=False, max_new_tokens=8)
        made = client.generate([tokenizer_pb2.Message(role="user", parts=parts)], do_sample=False, max_new_tokens=8)
        assert (made.text, made.usage.prompt_tokens) == (whole.text, whole.usage.prompt_tokens)
        image = tokenizer_pb2.ContentPart(image=tokenizer_pb2.MediaPart(url="https://example.com/x.png"))
        with pytest.raises(InvalidArgument, match="image parts are not supported") as caught:
            client.generate([tokenizer_pb2.Message(role="user", parts=[*parts, image])])
    assert caught.value.field == "messages[0].parts[2].image"
