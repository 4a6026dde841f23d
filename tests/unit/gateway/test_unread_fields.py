"""Fields of a body that nothing reads, and errors of options over HTTP, in words of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.wire.foreign_words import FOREIGN, WRONG_VALUES
from penstock.common.errors import InvalidArgument
from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.request_fields import _OWN_NAMES, Fields, checked, options_of
from penstock.gateway.unread_fields import noted_fields
from penstock_client._options import generate_request

JSON_VALUES = []
for one in WRONG_VALUES:
    try:
        JSON_VALUES.append(json.loads(json.dumps(one)))
    except (TypeError, ValueError):
        continue


def read(body: dict[str, Any], **settings: Any) -> tuple[tuple[str, ...], list[str]]:
    """Read a body as a route does; return the warnings and the ignored fields."""
    call = HttpCall(body, None, GatewayConfig(**settings))  # type: ignore[arg-type]
    fields = Fields(call)
    options = options_of(fields, call)
    fields.done()
    checked(options, lambda: generate_request("a text", options))
    return noted_fields(), call.ignored


def refusal(body: dict[str, Any]) -> InvalidArgument | None:
    try:
        read(body)
    except InvalidArgument as error:
        return error
    return None


@pytest.mark.parametrize("name", sorted(_OWN_NAMES))
def test_no_error_over_http_is_in_foreign_words(name: str) -> None:
    errors = [error for value in JSON_VALUES if (error := refusal({name: value})) is not None]
    for error in errors:
        assert not FOREIGN.search(error.message), error.message
        assert (error.field or "").split(".")[0].split("[")[0] in (name, "num_return_sequences"), error.message
        assert "found" not in error.message, "the value is the caller's"
    assert errors or name == "json_schema"


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("top-p", "top_p"),
        ("repetion_penalty", "repetition_penalty"),
    ],
)
def test_a_near_miss_is_told_in_the_answers_warnings(slip: str, meant: str) -> None:
    notes, ignored = read({slip: 1})
    assert notes == (f"{slip} is not known and has no effect, did you mean {meant}?",)
    assert ignored == [slip]
    with pytest.raises(InvalidArgument, match=f"^{slip}: is not known, did you mean {meant}\\?"):
        read({slip: 1}, unknown_fields="refuse")


def test_a_field_like_none_is_only_reported_or_refused_by_the_flag() -> None:
    assert read({"colour": "red"}) == ((), ["colour"])
    assert read({"top_p": 0.5}) == ((), [])
    with pytest.raises(InvalidArgument, match=r"^colour: is not known") as caught:
        read({"colour": "red"}, unknown_fields="refuse")
    assert caught.value.reason == "UNKNOWN_FIELD"
    assert read({"top_p": 0.5, "colour": None}, unknown_fields="refuse") == ((), [])


@pytest.mark.parametrize("way", ["report", "refuse"])
def test_a_field_of_caches_and_compilers_warns(way: str) -> None:
    for name in WITHOUT_EFFECT:
        notes, _ = read({name: "static"}, unknown_fields=way)
        assert [one for one in notes if one.startswith(f"{name} has no effect: ")], name


def test_a_field_that_would_change_the_answer_is_refused() -> None:
    for name in REFUSED:
        with pytest.raises(InvalidArgument, match=f"^{name}: .{{20,}}"):
            read({name: 2})


@pytest.mark.parametrize("way", ["report", "refuse"])
def test_a_field_that_asks_for_nothing_is_absent(way: str) -> None:
    for name in REFUSED:
        for value in (None, False, "", [], {}):
            assert read({name: value}, unknown_fields=way) == ((), []), name


def test_a_name_that_cannot_be_shown_is_not() -> None:
    assert read({"temperatur\u00e9": 1, "x" * 5000: 1})[0] == ()
