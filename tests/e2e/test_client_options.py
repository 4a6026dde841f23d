"""Options of the Python client on a real stack: each does what it says, in both clients."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from factories.servers.stack import Stack
from factories.wire.conversation import user
from penstock.v1 import common_pb2
from penstock_client import AsyncClient, Client, Completion, InvalidArgument

PROMPT = "The capital of France is"
MODES: list[tuple[str, dict[str, Any]]] = [
    ("GREEDY_SEARCH", {"do_sample": False}),
    ("SAMPLE", {"do_sample": True, "typical_p": 0.9, "seed": 3}),
    ("BEAM_SEARCH", {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True}),
    ("BEAM_SAMPLE", {"num_beams": 3, "do_sample": True, "seed": 3}),
    ("GROUP_BEAM_SEARCH", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    ("CONSTRAINED_BEAM_SEARCH", {"num_beams": 3, "force_words_ids": [[300], [[301], [302, 303]]]}),
    ("CONTRASTIVE_SEARCH", {"penalty_alpha": 0.6, "top_k": 4}),
    ("ASSISTED_GENERATION", {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}),
    ("DOLA_GENERATION", {"dola_layers": "low", "repetition_penalty": 1.2}),
    ("DOLA_GENERATION", {"dola_layers": [2, 3], "repetition_penalty": 1.2}),
    ("GREEDY_SEARCH", {"guidance_scale": 1.5, "negative_prompt": "The capital of Spain is"}),
]


def mode_of(completion: Completion) -> str:
    return common_pb2.GenerationMode.Name(completion.started.generation_mode).removeprefix("GENERATION_MODE_")


@pytest.mark.parametrize(("mode", "options"), MODES, ids=lambda value: str(value)[:40])
async def test_options_choose_the_mode_and_both_clients_agree(stack: Stack, mode: str, options: dict[str, Any]) -> None:
    wanted = {"max_new_tokens": 8, "return_token_ids": True, **options}
    with Client(stack.address) as client:
        completion = client.generate(PROMPT, **wanted)
    assert mode_of(completion) == mode
    assert list(completion.started.warnings) == []
    async with AsyncClient(stack.address) as client_:
        again = await client_.generate(PROMPT, **wanted)
    assert again.choices == completion.choices


def test_forced_and_forbidden_tokens(stack: Stack) -> None:
    with Client(stack.address) as client:
        plain = client.generate(PROMPT, max_new_tokens=4, return_token_ids=True, ignore_eos=True)
        first = plain.choices[0].token_ids[0]
        for forbid in (
            {"bad_words_ids": [[first]]},
            {"suppress_tokens": [first]},
            {"sequence_bias": {(first,): -100.0}},
            {"logit_bias": {first: -100.0}},
        ):
            answer = client.stream(PROMPT, max_new_tokens=4, return_token_ids=True, ignore_eos=True, **forbid)
            assert first not in answer.result().choices[0].token_ids
        beams = client.generate(
            PROMPT, num_beams=4, force_words_ids=[[300, 301]], max_new_tokens=8, return_token_ids=True, ignore_eos=True
        )
    ids = beams.choices[0].token_ids
    assert (300, 301) in pairwise(ids)


def test_structured_output(stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"],
        "additionalProperties": False,
    }
    with Client(stack.address) as client:
        document = json.loads(client.generate(user("Where?"), json_schema=schema, max_new_tokens=64).text)
        assert list(document) == ["city"]
        assert client.generate(user("Is it?"), choice=["maybe", "never"]).text in ("maybe", "never")
        assert client.generate(user("How many?"), regex="[0-9]{3}").text.isdigit()


def test_a_refusal_names_the_option(stack: Stack) -> None:
    with Client(stack.address) as client, pytest.raises(InvalidArgument) as refused:
        client.generate(PROMPT, num_beams=4, num_return_sequences=5)
    assert refused.value.field == "config.num_return_sequences"
