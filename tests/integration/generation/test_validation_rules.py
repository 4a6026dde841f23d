"""Every rule that refuses or warns, through the public API: for text and for token ids, at the router and behind it.

A router, a tokenizer process and a generation service on the embedded model. What is refused leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.refusals import ALWAYS_POSSIBLE, OUTSIDE, REFUSALS, Refusal, ids
from factories.servers.generation import Client, generation_service
from factories.servers.router import Answer, Router, collect, running_router
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, NotFound, PenstockError, from_rpc_error
from penstock.v1 import config_pb2, generation_pb2, text_pb2, tokenizer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7]
LONGEST = {"max_new_tokens": 2}


@dataclass
class Stack:
    """The public service and what is behind it."""

    router: Router
    backend: Client

    async def assert_nothing_is_left(self) -> None:
        """No request lives and no block is used, once those that were cancelled before are gone."""
        await self.router.until("num_requests_running", 0)
        await self.backend.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with AsyncExitStack() as running:
        backend = await running.enter_async_context(generation_service(demo_folder(), kv_memory="16MiB"))
        router = await running.enter_async_context(running_router(backend=(backend.running.address,)))
        yield Stack(router, backend)


def messages(row: Refusal) -> dict[str, Any]:
    """The fields that every kind of request has."""
    default = {} if "max_length" in row.config else LONGEST
    fields: dict[str, Any] = {
        "config": config_pb2.GenerationConfig(**{**default, **row.config}),
        "stop": config_pb2.StopConfig(**row.stop),
        "output": config_pb2.OutputConfig(**row.output),
    }
    return fields if row.constraint is None else {**fields, "constraint": config_pb2.Constraint(**row.constraint)}


async def refusal(call: Any) -> PenstockError:
    """Terminal of a stream that sent no tokens."""
    with pytest.raises(grpc.RpcError) as refused:
        await collect(call)
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(("turn", "row"), [*enumerate(REFUSALS)], ids=str)
async def test_what_cannot_be_is_refused_by_its_field(stack: Stack, turn: int, row: Refusal) -> None:
    """Every row meets one kind of request, in turns; all of them meet a session below."""
    fields, stub = messages(row), stack.router.stub
    hello = [tokenizer_pb2.Message(role="user", content="Hello")]
    kinds = (
        lambda: stub.Generate(text_pb2.GenerateTextRequest(text="Hello", **fields)),
        lambda: stub.Generate(text_pb2.GenerateTextRequest(token_ids=ids(*PROMPT), **fields)),
        lambda: stub.Chat(text_pb2.ChatRequest(messages=hello, **fields)),
        lambda: stack.backend.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=PROMPT, **fields)),
    )
    error = await refusal(kinds[turn % len(kinds)]())
    assert (type(error), error.field) == (row.kind, row.path)
    await stack.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        ("prompt", InvalidArgument, {"text": ""}),
        ("prompt", InvalidArgument, {"text": "x " * 5000}),
        ("prompt", InvalidArgument, {"token_ids": ids()}),
        ("prompt", InvalidArgument, {"token_ids": ids(OUTSIDE)}),
        ("prompt", InvalidArgument, {"token_ids": ids(*[1] * 4096)}),
        ("prompt", InvalidArgument, {}),
        ("model", NotFound, {"text": "Hello", "model": "nobody"}),
        ("adapter", NotFound, {"text": "Hello", "adapter": "nobody"}),
        ("priority", InvalidArgument, {"text": "Hello", "priority": 101}),
        ("priority", InvalidArgument, {"text": "Hello", "priority": -101}),
        ("request_id", InvalidArgument, {"text": "Hello", "request_id": "x" * 1000}),
        ("session_id", InvalidArgument, {"text": "Hello", "session_id": "x" * 1000}),
        ("cache_salt", InvalidArgument, {"text": "Hello", "cache_salt": "x" * 1000}),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, (str, dict)) else "",
)
async def test_the_rest_of_a_request(
    stack: Stack, path: str, kind: type[PenstockError], fields: dict[str, Any]
) -> None:
    error = await refusal(stack.router.stub.Generate(text_pb2.GenerateTextRequest(**fields)))
    assert (type(error), error.field) == (kind, path)
    await stack.assert_nothing_is_left()


async def test_every_option_is_in_the_table() -> None:
    tabled = {name for row in REFUSALS for name in row.config if row.path.startswith(f"config.{name}")}
    fields = {field.name for field in config_pb2.GenerationConfig.DESCRIPTOR.fields}
    assert fields - tabled - ALWAYS_POSSIBLE == {"negative_prompt_text"}


async def test_a_session_refuses_one_request_and_goes_on(stack: Stack) -> None:
    call = stack.backend.generation.Session()
    for number, row in enumerate(REFUSALS):
        submit = generation_pb2.GenerateRequest(request_id=f"r{number}", prompt_token_ids=PROMPT, **messages(row))
        await call.write(generation_pb2.SessionRequest(submit=submit))
        event = (await call.read()).events[0]
        assert (event.request_id, event.WhichOneof("event")) == (f"r{number}", "error")
        assert event.error.code == row.kind.code.value[0]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    await stack.assert_nothing_is_left()


async def test_a_negative_prompt_is_named_as_it_was_sent(stack: Stack) -> None:
    stub, config = stack.router.stub, config_pb2.GenerationConfig
    for negative in ("", "x " * 5000):
        too_much = config(guidance_scale=2.0, negative_prompt_text=negative, **LONGEST)
        error = await refusal(stub.Generate(text_pb2.GenerateTextRequest(text="Hello", config=too_much)))
        assert (type(error), error.field) == (InvalidArgument, "config.negative_prompt_text")
    direct = generation_pb2.GenerateRequest(prompt_token_ids=PROMPT, config=config(negative_prompt_text="x"))
    error = await refusal(stack.backend.generation.Generate(direct))
    assert error.field == "config.negative_prompt_text"
    await stack.assert_nothing_is_left()


async def test_no_refusal_repeats_what_was_sent(stack: Stack) -> None:
    for config in (
        {"assistant_model": "secret-777777"},
        {"watermarking_config": config_pb2.WatermarkingConfig(seeding_scheme="777777")},
        {"dola_layers": config_pb2.DolaLayers(preset="777777")},
        {"suppress_tokens": [777_777]},
        {"num_beams": 777_777},
    ):
        error = await refusal(
            stack.router.stub.Generate(
                text_pb2.GenerateTextRequest(text="Hello", config=config_pb2.GenerationConfig(**config))
            )
        )
        assert "777777" not in error.message


LOW = config_pb2.DolaLayers(preset="low")
WARNINGS: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"config.{name} has no effect", {name: value})
        for name, value in {
            "temperature": 0.7,
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.1,
            "top_h": 0.5,
            "typical_p": 0.9,
            "epsilon_cutoff": 0.1,
            "eta_cutoff": 0.1,
            "top_n_sigma": 1.0,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
            # Beams.
            "length_penalty": 2.0,
            "early_stopping": config_pb2.EARLY_STOPPING_NEVER,
            "num_beam_groups": 2,
            "diversity_penalty": 0.5,
            # Drafts.
            "max_matching_ngram_size": 3,
            "num_assistant_tokens": 5,
            "num_assistant_tokens_schedule": config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC,
            "assistant_confidence_threshold": 0.9,
        }.items()
    ),
    ("config.thinking_budget_tokens has no effect", {"thinking_budget_tokens": 5}),
    ("config.do_sample has no effect", {"do_sample": True, "temperature": 0.0}),
    ("config.negative_prompt has no effect", {"negative_prompt_ids": ids(1)}),
    ("config.negative_prompt has no effect", {"negative_prompt_ids": ids(1), "guidance_scale": 1.0}),
    ("config.penalty_alpha has no effect", {"penalty_alpha": 0.6, "do_sample": True}),
    ("config.penalty_alpha has no effect", {"penalty_alpha": 0.6, "top_k": 1}),
    ("config.max_length has no effect", {"max_new_tokens": 2, "max_length": 100}),
    ("config.min_length has no effect", {"min_new_tokens": 1, "min_length": 1}),
    ("the minimum length exceeds the maximum", {"min_new_tokens": 9, "max_new_tokens": 2}),
    ("the requested length exceeds the context", {"max_new_tokens": 100_000, "suppress_tokens": list(range(100))}),
    ("config.max_new_tokens is unset", {"max_new_tokens": None, "forced_bos_token_id": 4089}),
    ("a config.repetition_penalty of at least 1.2", {"dola_layers": LOW}),
    ("config.dola_layers has no effect", {"dola_layers": LOW, "num_beams": 2}),
    ("config.dola_layers has no effect", {"dola_layers": LOW, "prompt_lookup_num_tokens": 3}),
    ("config.num_assistant_tokens has no effect", {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 5}),
    ("config.prompt_lookup_num_tokens has no effect", {"prompt_lookup_num_tokens": 3, "num_beams": 2}),
    ("config.ngram_memory_num_tokens has no effect", {"ngram_memory_num_tokens": 3, "num_beams": 2}),
    ("config.ngram_memory_match has no effect", {"ngram_memory_match": 3, "lookahead_window": 2}),
    ("config.lookahead_guesses has no effect", {"lookahead_guesses": 3}),
    ("config.num_assistant_tokens has no effect", {"lookahead_window": 3, "num_assistant_tokens": 5}),
]


@pytest.mark.parametrize(
    ("turn", "warning", "config"),
    [(turn, *row) for turn, row in enumerate(WARNINGS)],
    ids=lambda value: str(value).replace("\n", " ")[:60],
)
async def test_warnings_of_transformers_are_passed_on(
    stack: Stack, turn: int, warning: str, config: dict[str, Any]
) -> None:
    # One step suffices where the answer would be long.
    message = config_pb2.GenerationConfig(**{**LONGEST, **config})
    stop = config_pb2.StopConfig(stop_token_ids=[ids(token) for token in range(64)])
    prompt: dict[str, Any] = ({"text": "Hello"}, {"token_ids": ids(*PROMPT)})[turn % 2]
    answer = await first_words(stack, text_pb2.GenerateTextRequest(config=message, stop=stop, **prompt))
    assert [text for text in answer.started.warnings if warning in text]
    await stack.backend.until_idle()


async def first_words(stack: Stack, request: text_pb2.GenerateTextRequest) -> Answer:
    """An answer up to its first event; the rest is cancelled."""
    call, answer = stack.router.stub.Generate(request), Answer()
    answer.add(await call.read())
    call.cancel()
    return answer


async def test_a_plain_request_is_not_warned_about(stack: Stack) -> None:
    plain = text_pb2.GenerateTextRequest(text="Hello", config=config_pb2.GenerationConfig(max_new_tokens=2))
    assert list((await collect(stack.router.stub.Generate(plain))).started.warnings) == []
    await stack.assert_nothing_is_left()
