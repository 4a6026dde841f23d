"""Forms of prompts and options that a caller in this process may use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generator.requests import RequestMaker, is_batch, is_conversation, keyword_options
from transformers import GenerationConfig

MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize("prompt", ["a text", "", [1, 2, 3], MESSAGES, np.array([4, 5])])
def test_one_prompt(prompt: Any) -> None:
    assert not is_batch(prompt)


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        ["a", "b"],
        [[1, 2], [3]],
        [MESSAGES, MESSAGES],
        ["a", [1, 2]],
        (text for text in "ab"),
        np.zeros((2, 3), int),
    ],
)
def test_several_prompts(prompts: Any) -> None:
    assert is_batch(prompts)


def test_a_conversation_is_a_list_of_messages() -> None:
    assert is_conversation(MESSAGES)
    assert not is_conversation("user")
    assert not is_conversation([1])
    assert not is_conversation([])


def test_transformers_configuration_becomes_keywords() -> None:
    config = GenerationConfig(max_new_tokens=5, num_beams=3, early_stopping=True, use_cache=True)
    assert keyword_options(config, {"num_beams": 2}) == {
        "max_new_tokens": 5,
        "num_beams": 2,
        "early_stopping": True,
        # Told to have no effect.
        "use_cache": True,
    }
    assert keyword_options({"do_sample": False, "top_k": None}, {}) == {"do_sample": False}
    assert keyword_options(None, {"seed": 1}) == {"seed": 1}


def test_ids_need_no_tokenizer_and_texts_do() -> None:
    maker = RequestMaker(None, 7)
    made = maker.make([3, np.int64(4)], {"max_new_tokens": 2, "seed": 11})
    assert list(made.message.prompt_token_ids) == [3, 4]
    assert (made.message.config.max_new_tokens, made.message.seed, made.context) == (2, 11, None)
    # As generate() without an input.
    assert list(maker.make([], {}).message.prompt_token_ids) == [7]
    for prompt, options in (("a", {}), (MESSAGES, {}), ([3], {"negative_prompt": "no", "guidance_scale": 2.0})):
        with pytest.raises(FailedPrecondition, match="tokenizer, which is not loaded") as caught:
            maker.make(prompt, options)  # type: ignore[arg-type]
        assert caught.value.reason == "NO_TOKENIZER"


@pytest.mark.parametrize("prompt", [b"Hello", bytearray(b"Hello")])
def test_bytes_are_no_ids(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: must be a text"):
        RequestMaker(None, None).make(prompt, {})


def test_a_wrong_option_is_named() -> None:
    maker = RequestMaker(None, None)
    with pytest.raises(TypeError, match="option 'max_tokens': unknown"):
        maker.make([1], {"max_tokens": 3})
    with pytest.raises(TypeError, match="option 'temperature'"):
        maker.make([1], {"temperature": "hot"})
