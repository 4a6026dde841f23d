"""Log-probabilities of other engines: the token itself comes first there, and most likely ones first here."""

from __future__ import annotations

import pytest
from penstock.engines.vllm_engine_pb2 import InputLogProbs, OutputLogProbs
from penstock.router.engines.engine_logprobs import from_input, from_output


def test_a_likely_token_has_its_rank_among_the_alternatives() -> None:
    told = OutputLogProbs(token_ids=[5], token_logprobs=[-1.0])
    told.top_logprobs.add(token_ids=[5, 9, 7], values=[-1.0, -0.5, -2.0])
    (position,) = from_output(told, 2)
    assert [one.token_id for one in position.top] == [9, 5]
    assert (position.chosen.token_id, position.chosen.rank) == (5, 2)


def test_the_rank_of_an_unlikely_token_is_not_told() -> None:
    told = OutputLogProbs(token_ids=[5], token_logprobs=[-9.0])
    told.top_logprobs.add(token_ids=[5, 9], values=[-9.0, -0.5])
    (position,) = from_output(told, 1)
    assert [one.token_id for one in position.top] == [9]
    assert position.chosen.rank == 0
    assert position.chosen.logprob == pytest.approx(-9.0)


def test_a_prompts_first_token_has_none() -> None:
    told = InputLogProbs(token_ids=[5, 6])
    told.token_logprobs.add()
    told.token_logprobs.add(value=-0.25)
    first, second = from_input(told, 0)
    assert not first.HasField("chosen")
    assert (second.chosen.token_id, second.chosen.logprob) == (6, -0.25)


def test_columns_of_different_lengths_end_with_the_shortest() -> None:
    told = OutputLogProbs(token_ids=[5, 6], token_logprobs=[-1.0])
    assert len(from_output(told, 2)) == 1
