"""Known weaknesses of what a release brings, as pip-audit tells them."""

from __future__ import annotations

import json

import pytest

from tools.release.advisories import NotAnswered, read_answer, requirements


def test_others_packages_are_asked_for_by_the_version_that_an_index_knows() -> None:
    installed = {"torch": "2.13.0+cpu", "penstock": "0.2.0", "penstock-client": "0.2.0", "idna": "3.10"}
    assert requirements(installed) == "idna==3.10\ntorch==2.13.0\n"


def test_weaknesses_are_told_and_what_no_index_knows_is_passed_over() -> None:
    answer = {
        "dependencies": [
            {"name": "one", "version": "1.0", "vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]},
            {"name": "two", "version": "2.0", "vulns": []},
            {"name": "own", "skip_reason": "not found"},
        ]
    }
    assert read_answer(json.dumps(answer), "") == ["one 1.0: PYSEC-1", "one 1.0: GHSA-2"]


@pytest.mark.parametrize(
    ("answer", "errors", "reason"),
    [
        ('{"dependencies": [{"name": "idna", "skip_reason": "not found on PyPI"}]}', "", "has no list"),
        ("", "Traceback\nConnectionError: no route", "ConnectionError: no route"),
        ("", "", "says nothing"),
    ],
)
def test_an_index_that_does_not_answer_is_no_clean_bill(answer: str, errors: str, reason: str) -> None:
    with pytest.raises(NotAnswered, match=reason):
        read_answer(answer, errors)
