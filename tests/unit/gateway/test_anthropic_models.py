"""Pages of the list of models, as Anthropic's clients ask for them."""

from __future__ import annotations

import pytest
from penstock.common.errors import InvalidArgument
from penstock.gateway.anthropic_models import anthropic_models

NAMES = [f"model-{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("query", "shown", "has_more"),
    [
        ("", NAMES, False),
        ("limit=2", NAMES[:2], True),
        ("limit=5", NAMES, False),
        ("limit=2&after_id=model-1", NAMES[2:4], True),
        ("limit=2&after_id=model-2", NAMES[3:], False),
        ("after_id=model-4", [], False),
        ("limit=2&before_id=model-4", NAMES[2:4], True),
        ("limit=9&before_id=model-2", NAMES[:2], False),
    ],
)
def test_a_page_has_the_models_that_were_asked_for(query: str, shown: list[str], has_more: bool) -> None:
    page = anthropic_models(NAMES, query)
    assert [model["id"] for model in page["data"]] == shown
    assert page["has_more"] is has_more
    ends = (shown[0], shown[-1]) if shown else (None, None)
    assert (page["first_id"], page["last_id"]) == ends


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=٣", "limit"),
        ("after_id=other", "after_id"),
        ("before_id=other", "before_id"),
        ("after_id=model-1&before_id=model-2", "before_id"),
    ],
)
def test_a_wrong_parameter_is_named(query: str, parameter: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        anthropic_models(NAMES, query)
    assert caught.value.field == parameter
