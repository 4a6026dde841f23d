"""Errors of options are in the client's own words, whatever value is given: never in Python's or protobuf's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from factories.wire.foreign_words import FOREIGN, WRONG_VALUES
from penstock.common.errors import PenstockError
from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT
from penstock_client._option_table import CONFIG, OUTPUT, STOP
from penstock_client._options import (
    GenerationOptions,
    chat_request,
    check_many,
    check_options,
    generate_request,
)
from penstock_client._types import Choice
from penstock_client.sail import set_loglevel

NAMES = sorted(GenerationOptions.__annotations__)


def words_of(name: str, value: Any) -> str | None:
    """Return the words that refuse an option; None: it is taken."""
    try:
        check_options(**{name: value})
    except (TypeError, ValueError, PenstockError) as error:
        return str(error)
    return None


def test_the_sweep_has_every_option() -> None:
    assert {*CONFIG, *STOP, *OUTPUT} - {"negative_prompt_text"} <= {*NAMES}
    assert len(NAMES) * len(WRONG_VALUES) > 2000


@pytest.mark.parametrize("name", NAMES)
def test_no_error_of_an_option_is_in_foreign_words(name: str) -> None:
    refused = 0
    for value in WRONG_VALUES:
        words = words_of(name, value)
        if words is None:
            continue
        refused += 1
        assert not FOREIGN.search(words), (value, words)
        assert words.startswith((f"option {name!r}: ", "options ")), (value, words)
    assert refused >= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, "option 'top_k': must be a whole number from 0 to 4294967295, found -1"),
        ({"do_sample": "yes"}, "option 'do_sample': must be True or False, found a str"),
        ({"assistant_model": object()}, "option 'assistant_model': must be a text, found an object"),
        ({"exponential_decay_length_penalty": (1,)}, "must be a pair (start_index, decay_factor)"),
        ({"logits_processor": [object()]}, "must be a name, a list of names or of (name, parameters)"),
        ({"temprature": 1.0}, "option 'temprature': unknown, did you mean 'temperature'?"),
        ({"nothing_like_it": 1.0}, "option 'nothing_like_it': unknown, see GenerationOptions"),
    ],
)
def test_the_words_say_what_is_taken(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        check_options(**options)


@pytest.mark.parametrize("prompt", [[-1], [1 << 40], ["a", 2], [1.5], [object()], [None]])
def test_a_prompt_that_is_none_is_named(prompt: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^prompt: ") as caught:
        generate_request(prompt, {})
    assert not FOREIGN.search(str(caught.value))


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_field_of_caches_and_compilers_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} has no effect: "):
        check_options(**{name: "static"})  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_would_change_the_answer_is_refused_with_what_helps(name: str) -> None:
    with pytest.raises(TypeError, match=f"option {name!r}: .{{20,}}"):
        check_options(**{name: 2})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: generate_request(5, {}), "prompt: must be a text, a list of ids or a list of messages, found 5"),  # type: ignore[arg-type]
        (lambda: generate_request(None, {}), "prompt: must be a text, .*, found None"),  # type: ignore[arg-type]
        (lambda: check_many(5, {}), "prompts: several texts"),  # type: ignore[arg-type]
        (lambda: chat_request(5, (), (), None, {}), "messages: must be a list .*, found 5"),  # type: ignore[arg-type]
        (lambda: set_loglevel("x"), "loglevel: must be one of LogLevel.TRACE, "),  # type: ignore[arg-type]
        (lambda: Choice(0, token_ids=[5]).transition_scores(), "'output_scores'"),
    ],
)
def test_what_cannot_be_read_at_all_is_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_half_of_the_seeds_are_two() -> None:
    """Signed ones are taken for OpenAI's clients, and the range has no more numbers."""
    seeds = [generate_request("x", {"seed": seed}).config.seed for seed in (-1, 2**63 - 1, -(2**63), 0)]
    assert seeds == [2**63 - 1, 2**63 - 1, 0, 0]
