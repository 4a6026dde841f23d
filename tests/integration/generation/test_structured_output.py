"""Constraints through the generation service: every kind, in every mode, beside other requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.grammars import EOS, ids_of, text_tokenizer
from factories.servers.generation import Client, Outcome, generation_service, request, text_checkpoint
from factories.servers.sessions import Session
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import Cancelled, DeadlineExceeded, FailedPrecondition, InvalidArgument
from penstock.v1 import common_pb2, config_pb2, generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
DONE, LENGTH = common_pb2.FINISH_REASON_CONSTRAINT_DONE, common_pb2.FINISH_REASON_LENGTH
STOP_EOS = common_pb2.FINISH_REASON_STOP_EOS
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
OPEN = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$", "format": "path"}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "propertyNames": {"type": "string"},
}
# Kind -> (constraint, what a complete output looks like).
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, r'\{"name":".*","on":(true|false)\}'),
    # Without `additionalProperties`: no invented key, none that comes twice, and no white space by the caller's word.
    "compact": (
        {"json_schema": json.dumps({**OPEN, "x-guidance": {"compact": True}})},
        r'\{"name":"[^"]*","on":(true|false)\}',
    ),
    "as models write": ({"json_schema": json.dumps(OPEN)}, r'\{"name":\x20?"[^"]*",\s*"on":\x20?(true|false)\}'),
    "regex": ({"regex": r"[a-c]{2}-[0-9]{1,3}"}, r"[a-c]{2}-[0-9]{1,3}"),
    "lark": ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,8}/'}, r"<[a-z]{1,8}>"),
    "gbnf": ({"grammar": 'root ::= "n=" [0-9]{2,4} ";"'}, r"n=[0-9]{2,4};"),
    "choice": ({"choice": config_pb2.Choices(values=["yes", "no", "yes please"])}, r"yes|no|yes please"),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 0},
    "three samples": {"do_sample": True, "top_p": 0.9, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 1.5},
}
# Minutes for llguidance.
ENDLESS = {"json_schema": json.dumps({"type": "integer", "multipleOf": 99_999_989})}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with generation_service(demo_folder()) as running:
        yield running


def constrained(
    kind: str | dict[str, Any], *, ignore_eos: bool = False, **fields: Any
) -> generation_pb2.GenerateRequest:
    fields["config"] = {"max_new_tokens": 60, **fields.get("config", {})}
    source = KINDS[kind][0] if isinstance(kind, str) else kind
    prompt = fields.pop("prompt", ids_of("Answer yes or no, or n=12;"))
    return request(
        prompt,
        stop={"ignore_eos": ignore_eos},
        constraint=config_pb2.Constraint(**source),
        eos_token_ids=EOS,
        seed=3,
        **fields,
    )


def texts(outcome: Outcome) -> list[str]:
    assert outcome.error is None, outcome.error
    return [
        text_tokenizer().decode(outcome.ids(end.index), skip_special_tokens=True) for end in outcome.finished.sequences
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_complete_output_obeys(client: Client, kind: str, mode: str) -> None:
    outcome = await client.generate(constrained(kind, config=MODES[mode]))
    for text, end in zip(texts(outcome), outcome.finished.sequences, strict=True):
        assert end.finish_reason in (DONE, STOP_EOS)
        assert re.fullmatch(KINDS[kind][1], text), text
    await client.until_idle()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("kind", KINDS)
async def test_prompt_lookup_changes_nothing(client: Client, kind: str, mode: str) -> None:
    plain = await client.generate(constrained(kind, config=MODES[mode]))
    assisted = await client.generate(constrained(kind, config={**MODES[mode], "prompt_lookup_num_tokens": 4}))
    assert plain.ids() == assisted.ids()


async def test_a_draft_model_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    target, draft = (text_checkpoint(tmp_path_factory.mktemp(name), seed=seed) for seed, name in enumerate(("a", "b")))
    async with generation_service(target, assistant_model=str(draft)) as both:
        for kind in KINDS:
            for mode in ("greedy", "three samples"):
                options = {"max_new_tokens": 120, **MODES[mode]}
                plain = await both.generate(constrained(kind, config=options))
                assisted = await both.generate(constrained(kind, config={**options, "assistant_model": draft.name}))
                assert texts(plain) == texts(assisted)
        await both.until_idle()


async def test_a_choice_ends_where_nothing_may_follow(client: Client) -> None:
    outcome = await client.generate(constrained({"choice": config_pb2.Choices(values=["maybe"])}))
    assert texts(outcome) == ["maybe"]
    assert outcome.finished.sequences[0].finish_reason == DONE
    both = {"choice": config_pb2.Choices(values=["a", "ab"])}
    ends = await client.generate(constrained(both, config={"suppress_tokens": ids_of("b") + ids_of("ab")}))
    assert texts(ends) == ["a"]
    assert ends.finished.sequences[0].finish_reason == STOP_EOS


async def test_a_request_that_ignores_the_end_goes_on_as_long_as_the_grammar_lets_it(client: Client) -> None:
    outcome = await client.generate(constrained({"regex": "a{1,7}"}, ignore_eos=True))
    assert texts(outcome) == ["a" * 7]
    assert outcome.finished.sequences[0].finish_reason == DONE


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_a_few_tokens_are_a_beginning(client: Client, length: int) -> None:
    outcome = await client.generate(constrained("json_schema", config={"max_new_tokens": length}))
    assert '{"name":"'.startswith(texts(outcome)[0][:9])
    assert outcome.finished.sequences[0].finish_reason == LENGTH


async def test_an_output_is_closed_before_its_limit_for_callers_that_expect_it(client: Client) -> None:
    digits = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 30}

    async def answer(tokens: int, *, may_be_closed: bool) -> Outcome:
        message = constrained({"json_schema": json.dumps(digits)}, config={"max_new_tokens": tokens})
        message.may_be_closed = may_be_closed
        return await client.generate(message)

    whole = (await answer(120, may_be_closed=False)).ids()
    assert len(whole) > 60
    cut = await answer(60, may_be_closed=False)
    # A router of before takes LENGTH for a lie unless the tokens are as many as the limit.
    assert cut.ids() == whole[:60]
    assert cut.finished.sequences[0].finish_reason == LENGTH
    text = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3}
    message = constrained({"json_schema": json.dumps(text)}, config={"max_new_tokens": 20}, may_be_closed=True)
    assert len(json.loads(texts(await client.generate(message))[0])) >= 3


async def test_any_json_object_parses(client: Client) -> None:
    few = [token_id for text in '{}":,a1[]' for token_id in ids_of(text)]
    options = {"do_sample": True, "top_k": 0, "temperature": 2.0, "allowed_token_ids": few, "max_new_tokens": 800}
    outcome = await client.generate(constrained({"json_object": True}, config={**options, "num_return_sequences": 4}))
    assert all(isinstance(json.loads(text), dict) for text in texts(outcome))


async def test_constrained_and_free_requests_together_give_what_each_gives_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Its scores are no near ties, which the order of a larger batch's sums might turn.
    async with generation_service(text_checkpoint(tmp_path_factory.mktemp("model"))) as client:
        await same_alone_and_together(client)


async def same_alone_and_together(client: Client) -> None:
    modes = ["greedy", "sampling", "three samples", "penalties", "beams", "prompt lookup"]
    messages = [constrained(kind, config=MODES[mode]) for kind in KINDS for mode in modes]
    messages += [
        request(ids_of(f"Say {number}."), config={"do_sample": True, "max_new_tokens": 30}, seed=number)
        for number in range(10)
    ]
    alone = [await client.generate(message) for message in messages]
    together = await asyncio.gather(*(client.generate(message) for message in messages))
    for one, other in zip(alone, together, strict=True):
        assert texts(one) == texts(other)
        assert [one.ids(end.index) for end in one.finished.sequences] == [
            other.ids(end.index) for end in other.finished.sequences
        ]
    await client.until_idle()


async def test_logprobs_are_of_what_the_grammar_allows(client: Client) -> None:
    outcome = await client.generate(constrained({"regex": "abc"}, output={"top_logprobs": 2}))
    assert texts(outcome) == ["abc"]
    only = ids_of("abc")
    for delta in outcome.deltas:
        assert all(entry.chosen.logprob <= 0.0 for entry in delta.logprobs)
    assert len(outcome.ids()) >= len(only)


async def test_resumed_tokens_must_obey(client: Client) -> None:
    first = await client.generate(constrained("json_schema"))
    ids = first.ids()
    again = await client.generate(constrained("json_schema", resumed_token_ids=[common_pb2.TokenIds(ids=ids[:3])]))
    assert ids[:3] + again.ids() == ids
    wrong = [common_pb2.TokenIds(ids=ids_of("no json"))]
    refused = await client.generate(constrained("json_schema", resumed_token_ids=wrong))
    assert isinstance(refused.error, InvalidArgument)
    assert refused.error.field == "resumed_token_ids"


@pytest.mark.parametrize(
    ("source", "field", "reason"),
    [
        ({}, "constraint", "INVALID_FIELD"),
        ({"json_object": False}, "constraint.json_object", "INVALID_FIELD"),
        ({"json_schema": '{"not": {}}'}, "constraint.json_schema", "INVALID_FIELD"),
        ({"json_schema": '{"type": "integer", "minimum": 2, "maximum": 1}'}, "constraint.json_schema", "INVALID_FIELD"),
        ({"regex": "("}, "constraint.regex", "INVALID_FIELD"),
        ({"grammar": "nothing"}, "constraint.grammar", "INVALID_FIELD"),
        ({"choice": config_pb2.Choices()}, "constraint.choice", "INVALID_FIELD"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_alone_and_in_a_session(
    client: Client, source: dict[str, Any], field: str, reason: str
) -> None:
    outcome = await client.generate(constrained(source))
    assert isinstance(outcome.error, InvalidArgument)
    assert (outcome.error.field, outcome.error.reason) == (field, reason)
    session = Session(client)
    await session.submit(constrained(source, request_id="bad"))
    await session.submit(constrained("regex", request_id="good"))
    await session.rest()
    assert session.kinds("bad") == ["error"]
    assert session.kinds("good")[-1] == "finished"


async def test_a_compilation_over_its_time_is_refused_alone_and_in_a_session() -> None:
    async with generation_service(demo_folder(), constraint_compile_seconds=0.5) as short:
        outcome = await short.generate(constrained(ENDLESS))
        assert isinstance(outcome.error, InvalidArgument)
        assert (outcome.error.field, outcome.error.reason) == ("constraint.json_schema", "CONSTRAINT_TOO_COMPLEX")
        session = Session(short)
        await session.submit(constrained(ENDLESS, request_id="bad"))
        await session.submit(request(request_id="good"))
        await session.rest()
        assert session.kinds("bad") == ["error"]
        assert session.kinds("good")[-1] == "finished"


async def test_a_slow_compilation_does_not_hold_up_its_session_and_can_be_aborted(client: Client) -> None:
    session = Session(client)
    await session.submit(constrained(ENDLESS, request_id="slow", attempt_epoch=4))
    await session.submit(constrained(ENDLESS, request_id="slow", attempt_epoch=5))
    await session.submit(constrained("choice", request_id="quick"))
    while not session.kinds("quick") or session.kinds("quick")[-1] != "finished":
        await session.next()
    (duplicate,) = session.events("slow")
    assert duplicate.attempt_epoch == 5
    await session.abort("slow", 4)
    while len(session.events("slow")) < 2:
        await session.next()
    session.call.cancel()
    events = session.events("slow")
    assert [event.attempt_epoch for event in events] == [5, 4]
    assert events[1].error.code == 1


async def test_abort_ends_a_compilation(client: Client) -> None:
    call = asyncio.create_task(client.generate(constrained(ENDLESS, request_id="gone")))
    aborted: list[str] = []
    while not aborted:
        await asyncio.sleep(0.005)
        answer = await client.generation.Abort(generation_pb2.AbortRequest(request_ids=["gone"]))
        aborted = list(answer.request_ids)
    assert aborted == ["gone"]
    assert isinstance((await call).error, Cancelled)


async def test_a_request_that_is_still_prepared_waits_by_the_load_report(client: Client) -> None:
    call = asyncio.create_task(client.generate(constrained(ENDLESS, request_id="made")))
    # A router takes a request that no report counts for forgotten, and moves it.
    await client.until(lambda load: load.waiting_requests == 1)
    await client.generation.Abort(generation_pb2.AbortRequest(request_ids=["made"]))
    assert isinstance((await call).error, Cancelled)
    await client.until_idle()


async def test_a_deadline_ends_the_wait_for_a_compilation(client: Client) -> None:
    outcome = await client.generate(constrained(ENDLESS, timeout_seconds=0.2))
    assert isinstance(outcome.error, DeadlineExceeded)
    assert outcome.error.metadata == {"stage": "constraint"}


async def test_a_session_that_goes_away_leaves_nothing_behind(client: Client) -> None:
    session = Session(client)
    await session.submit(constrained(ENDLESS, request_id="left"))
    await session.submit(constrained("choice", request_id="quick"))
    await session.next()
    session.call.cancel()
    await client.until_idle()
    again: Outcome | None = None
    while again is None or again.error is not None:
        await asyncio.sleep(0.005)
        again = await client.generate(constrained("choice", request_id="left"))
    assert re.fullmatch(KINDS["choice"][1], texts(again)[0])


async def test_a_model_without_a_tokenizer_refuses_constraints(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = text_checkpoint(tmp_path_factory.mktemp("bare"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    async with generation_service(folder) as bare:
        outcome = await bare.generate(constrained("regex"))
        assert isinstance(outcome.error, FailedPrecondition)
        assert (outcome.error.field, outcome.error.reason) == ("constraint", "NO_TOKENIZER")
        assert (await bare.generate(request())).error is None
