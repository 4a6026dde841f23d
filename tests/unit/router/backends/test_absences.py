"""Record of what has no ready backend any more."""

from __future__ import annotations

from penstock.router.backends.absences import Absences
from penstock.router.backends.discovery import BackendAddress

ONE, TWO, OTHER = (BackendAddress(name, name) for name in ("one", "two", "other"))


def test_a_model_is_absent_from_the_loss_of_its_last_backend_to_its_return() -> None:
    now = 5.0
    absences = Absences(lambda: now)
    absences.note(ONE, "m", ("mine",), is_ready=True)
    absences.note(TWO, "m", (), is_ready=True)
    absences.note(OTHER, "n", (), is_ready=True)
    assert absences.since("m", "") is None
    absences.note(ONE, "m", ("mine",), is_ready=False)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (None, 5.0)
    now = 6.0
    absences.note(TWO, "m", (), is_ready=False)
    now = 7.0
    for where in (ONE, TWO):
        absences.note(where, "m", ("mine",) if where is ONE else (), is_ready=False)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (6.0, 5.0)
    assert absences.since("n", "") is None
    absences.note(ONE, "m", ("mine",), is_ready=True)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (None, None)


def test_what_was_never_there_and_what_is_gone_for_good_is_not_absent() -> None:
    absences = Absences()
    absences.note(ONE, "m", (), is_ready=False)
    assert absences.since("m", "") is None
    absences.note(TWO, "n", ("a",), is_ready=True)
    absences.note(TWO, None, (), is_ready=False)
    assert absences.since("n", "") is None
    absences.note(TWO, "n", ("a",), is_ready=True)
    absences.note(TWO, "n", ("a",), is_ready=False)
    assert absences.since("n", "a") is not None
    absences.note(TWO, "n", (), is_ready=False)
    assert absences.since("n", "a") is None
    assert absences.since("n", "") is not None
