"""Prompt lookup finds what transformers' definition finds, without rescanning the context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.engine.decoding.prompt_lookup import NgramIndex, prompt_lookup
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator


def naive(token_ids: list[int], num_tokens: int, max_ngram_size: int, eos: frozenset[int]) -> list[int]:
    """Draft by the definition: longest n-gram first, its first earlier occurrence, the tokens after it up to an eos."""
    for size in range(min(max_ngram_size, len(token_ids) - 1), 0, -1):
        for start in range(len(token_ids) - size):
            if token_ids[start : start + size] == token_ids[-size:]:
                drafts = token_ids[start + size : start + size + num_tokens]
                ends = [position for position, token in enumerate(drafts) if token in eos]
                return drafts[: ends[0]] if ends else drafts
    return []


texts = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), min_size=1, max_size=60))
ends = st.frozensets(st.integers(0, 4), max_size=2)


@settings(max_examples=75, deadline=None)
@given(text=texts, num_tokens=st.integers(1, 12), size=st.integers(1, 6), eos=ends, data=st.data())
def test_the_index_gives_what_the_definition_gives_after_every_token(
    text: list[int], num_tokens: int, size: int, eos: frozenset[int], data: st.DataObject
) -> None:
    index = NgramIndex(size)
    length = 0
    while length < len(text):
        # Several accepted tokens may come at once.
        length = min(len(text), length + data.draw(st.integers(1, 5)))
        seen = text[:length]
        assert prompt_lookup(index, seen, num_tokens, eos) == naive(seen, num_tokens, size, eos)


@settings(max_examples=30, deadline=None)
@given(text=texts.filter(lambda text: len(text) > 1), num_tokens=st.integers(1, 12), size=st.integers(1, 6), eos=ends)
def test_the_index_gives_what_transformers_gives(
    text: list[int], num_tokens: int, size: int, eos: frozenset[int]
) -> None:
    reference = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(sorted(eos)) if eos else None,
        num_output_tokens=num_tokens,
        max_matching_ngram_size=size,
        max_length=1000,
    )
    candidates, _ = reference.get_candidates(torch.tensor([text]))
    assert prompt_lookup(NgramIndex(size), text, num_tokens, eos) == candidates[0, len(text) :].tolist()


@settings(max_examples=25, deadline=None)
@given(prompt=texts, tails=st.lists(texts, min_size=2, max_size=2), size=st.integers(1, 4))
def test_copies_of_an_index_go_their_own_ways(prompt: list[int], tails: list[list[int]], size: int) -> None:
    shared = NgramIndex(size)
    shared.extend(prompt)
    for tail in tails:
        text = prompt + tail
        assert prompt_lookup(shared.copy(), text, 5, ()) == naive(text, 5, size, frozenset())


@pytest.mark.parametrize("size", [1, 2, 64])
def test_text_without_repetitions_takes_one_node_a_token(size: int) -> None:
    index = NgramIndex(size)
    index.extend(range(1000))
    assert len(index._ends) == 1001
    assert index.continuation(range(1000), 5) == []
