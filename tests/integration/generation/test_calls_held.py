"""Grammars of calls through the generation service: text before a marker is the model's own, and a call obeys."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.grammars import ids_of, text_tokenizer
from factories.servers.generation import Client, Outcome, generation_service, request, text_checkpoint
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument
from penstock.v1 import common_pb2, config_pb2, generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "Once upon a time there was"
CALL = r"\[[0-9]{3}\]"
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3},
    "sampling": {"do_sample": True, "temperature": 1.2},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with generation_service(demo_folder()) as running:
        yield running


def asked(opens: str = "", tokens: int = 60, **fields: Any) -> generation_pb2.GenerateRequest:
    config = {"max_new_tokens": tokens, **fields.pop("config", {})}
    if opens:
        literal = opens.replace('"', '\\"').replace("\n", "\\n")
        grammar = f'start: "{literal}" /{CALL}/'
        fields["calls"] = generation_pb2.CallGrammar(opens=[opens], grammar=grammar)
    return request(ids_of(PROMPT), config=config, seed=5, **fields)


def texts(outcome: Outcome) -> list[str]:
    assert outcome.error is None, outcome.error
    return [
        text_tokenizer().decode(outcome.ids(end.index), skip_special_tokens=False) for end in outcome.finished.sequences
    ]


def word_of(ids: list[int]) -> tuple[int, str]:
    """Return a place in an output, and the word that its token begins with a blank and that comes first there."""
    pieces = [text_tokenizer().decode([token_id]) for token_id in ids]
    for place in range(5, len(pieces)):
        text = "".join(pieces[: place + 1])
        if re.fullmatch(r" [a-z]{2,}", pieces[place]) and text.index(pieces[place]) == len(text) - len(pieces[place]):
            return place, pieces[place]
    raise AssertionError("no such word")


async def test_the_output_is_the_models_own_up_to_the_marker_and_a_call_from_there(client: Client) -> None:
    plain = (await client.generate(asked())).ids()
    place, word = word_of(plain)
    held = await client.generate(asked(word))
    assert held.ids()[: place + 1] == plain[: place + 1]
    behind = texts(held)[0].partition(word)[2]
    assert re.match(CALL, behind)
    assert len(behind) > len("[123]")
    assert [each.finish_reason for each in held.finished.sequences] == [common_pb2.FINISH_REASON_LENGTH]


async def test_a_marker_that_does_not_come_changes_nothing(client: Client) -> None:
    plain, held = await client.generate(asked()), await client.generate(asked("<tool_call>"))
    assert plain.ids() == held.ids()


@pytest.mark.parametrize("mode", MODES)
async def test_every_call_obeys_in_every_mode(client: Client, mode: str) -> None:
    _, word = word_of((await client.generate(asked(config=MODES[mode]))).ids())
    for text in texts(await client.generate(asked(word, config=MODES[mode]))):
        for behind in text.split(word)[1:]:
            assert re.match(CALL, behind) or re.match(r"\[?[0-9]{0,3}$", behind), text
    await client.until_idle()


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
async def test_prompt_lookup_changes_no_call(client: Client, mode: str) -> None:
    _, word = word_of((await client.generate(asked(config=MODES[mode]))).ids())
    plain = await client.generate(asked(word, config=MODES[mode]))
    assisted = await client.generate(asked(word, config={**MODES[mode], "prompt_lookup_num_tokens": 4}))
    assert plain.ids() == assisted.ids()


async def test_a_draft_model_changes_no_call(tmp_path_factory: pytest.TempPathFactory) -> None:
    draft = text_checkpoint(tmp_path_factory.mktemp("draft"), seed=1)
    async with generation_service(demo_folder(), assistant_model=str(draft)) as both:
        for mode in ("greedy", "sampling"):
            _, word = word_of((await both.generate(asked(config=MODES[mode]))).ids())
            plain = await both.generate(asked(word, config=MODES[mode]))
            assisted = await both.generate(asked(word, config={**MODES[mode], "assistant_model": draft.name}))
            assert plain.ids() == assisted.ids()


async def test_a_resumed_output_goes_on_within_its_call(client: Client) -> None:
    place, word = word_of((await client.generate(asked())).ids())
    whole = (await client.generate(asked(word))).ids()
    for cut in (place, place + 1, place + 2, place + 9):
        rest = await client.generate(asked(word, resumed_token_ids=[common_pb2.TokenIds(ids=whole[:cut])]))
        assert rest.ids() == whole[cut:]


async def test_a_constraint_of_the_whole_output_comes_first(client: Client) -> None:
    _, word = word_of((await client.generate(asked())).ids())
    held = await client.generate(asked(word, constraint=config_pb2.Constraint(regex="[a-z]{4}")))
    assert re.fullmatch("[a-z]{4}", texts(held)[0])


async def test_beside_a_constraint_an_output_is_the_answer_or_calls(client: Client) -> None:
    calls = generation_pb2.CallGrammar(beside_answer=f"start: @answer | call\ncall: /{CALL}/")
    many = {"do_sample": True, "temperature": 100.0, "num_return_sequences": 12}
    constraint = config_pb2.Constraint(choice=config_pb2.Choices(values=["q"]))
    found = texts(await client.generate(asked(calls=calls, config=many, constraint=constraint)))
    assert {re.fullmatch(CALL, text) is not None for text in found} == {True, False}
    assert all(re.fullmatch(f"q|{CALL}", text) for text in found), found


@pytest.mark.parametrize("tokens", [2, 5])
async def test_a_limit_makes_no_call_in_place_of_an_answer(client: Client, tokens: int) -> None:
    """The search for a short end took the call, which nobody had chosen."""
    calls = generation_pb2.CallGrammar(beside_answer='start: (answer | call)\nanswer: @answer\ncall: "z" /[0-9]/')
    constraint = config_pb2.Constraint(regex="[a-y]{4,9}")
    # One id of a letter: the model's own choice among all that may begin.
    asking = asked(calls=calls, tokens=tokens, constraint=constraint, may_be_closed=True)
    assert texts(await client.generate(asking))[0][0] != "z"


async def test_a_tool_without_a_grammar_is_named_beside_a_constraint(client: Client) -> None:
    schema = '{"$comment": "tool lookup", "type": "array", "contains": {"type": "integer"}}'
    calls = generation_pb2.CallGrammar(beside_answer=f"start: @answer | call\ncall: %json {schema}")
    outcome = await client.generate(asked(calls=calls, constraint=config_pb2.Constraint(json_object=True)))
    assert isinstance(outcome.error, InvalidArgument)
    assert outcome.error.description.startswith("tool lookup")


BROKEN = pytest.mark.parametrize(
    "calls",
    [
        generation_pb2.CallGrammar(opens=[""], grammar='start: "a"'),
        generation_pb2.CallGrammar(grammar='start: "a"'),
        generation_pb2.CallGrammar(opens=["a"], grammar="start: nothing"),
    ],
)


@BROKEN
async def test_a_required_grammar_of_calls_that_is_none_is_refused_by_name(
    client: Client, calls: generation_pb2.CallGrammar
) -> None:
    required = generation_pb2.CallGrammar(opens=calls.opens, grammar=calls.grammar, is_required=True)
    outcome = await client.generate(asked(calls=required))
    assert isinstance(outcome.error, InvalidArgument)
    assert outcome.error.field == "calls"


@BROKEN
async def test_without_its_grammar_a_request_that_can_do_without_is_answered_with_a_warning(
    client: Client, calls: generation_pb2.CallGrammar
) -> None:
    plain, outcome = await client.generate(asked()), await client.generate(asked(calls=calls))
    assert outcome.ids() == plain.ids()
    assert any("calls are not held to a grammar" in one for one in outcome.started.warnings)
