"""Most tokens of a request: what a key reserves must be no less than the backend may generate."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.router.frontend.convert import MAX_OUTPUT_TOKENS, most_tokens
from penstock.router.tokenizer.pipeline import Prompt
from penstock.v1 import config_pb2, model_pb2, text_pb2

PROMPT, CONTEXT = 10, 100


@pytest.mark.parametrize(
    ("asked", "default", "most"),
    [
        ({}, {}, 90),
        ({"max_new_tokens": 5}, {"max_new_tokens": 7}, 5),
        ({"max_new_tokens": 500}, {}, 90),
        ({"max_new_tokens": 5, "max_length": 12}, {}, 5),
        ({"max_length": 12}, {"max_new_tokens": 7}, 2),
        ({}, {"max_new_tokens": 7}, 7),
        ({}, {"max_length": 30}, 20),
        ({}, {"max_length": 5}, 90),
        ({"max_new_tokens": 5, "num_return_sequences": 3}, {}, 15),
        ({"max_new_tokens": 5, "num_beams": 4}, {}, 5),
        ({"max_new_tokens": 5}, {"num_return_sequences": 2}, 10),
    ],
)
def test_a_requests_limit_comes_before_the_models_and_the_context(
    asked: dict[str, Any], default: dict[str, Any], most: int
) -> None:
    info = model_pb2.GetModelInfoResponse(default_config=config_pb2.GenerationConfig(**default))
    info.limits.max_context_tokens = CONTEXT
    request = text_pb2.GenerateTextRequest(config=config_pb2.GenerationConfig(**asked))
    assert most_tokens(Prompt([1] * PROMPT), request, info) == (PROMPT, most)


def test_without_facts_about_the_model_it_is_the_most_there_can_be() -> None:
    request = text_pb2.GenerateTextRequest()
    assert most_tokens(Prompt([1] * PROMPT), request, None) == (PROMPT, MAX_OUTPUT_TOKENS)
    assert most_tokens(Prompt([1] * PROMPT), request, model_pb2.GetModelInfoResponse()) == (PROMPT, MAX_OUTPUT_TOKENS)
