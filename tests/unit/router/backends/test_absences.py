"""Record of what has no ready backend any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.router.backends.absences import Absences


def backend(model: str, *adapters: str) -> Any:
    known = SimpleNamespace(names=adapters)
    return SimpleNamespace(
        link=SimpleNamespace(info=SimpleNamespace(model=model)), adapters=SimpleNamespace(known=known)
    )


def test_a_model_is_absent_from_the_loss_of_its_last_backend_to_its_return() -> None:
    now = 5.0
    absences = Absences(lambda: now)
    one, two, other = backend("m", "mine"), backend("m"), backend("n")
    everyone = [one, two, other]
    absences.note(everyone, everyone)
    assert absences.since("m", "") is None
    absences.note([two, other], everyone)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (None, 5.0)
    now = 6.0
    absences.note([other], everyone)
    now = 7.0
    absences.note([other], everyone)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (6.0, 5.0)
    assert absences.since("n", "") is None
    absences.note(everyone, everyone)
    assert (absences.since("m", ""), absences.since("m", "mine")) == (None, None)


def test_what_was_never_there_and_what_is_gone_for_good_is_not_absent() -> None:
    absences = Absences()
    starting, gone = backend("m"), backend("n", "a")
    absences.note([gone], [starting, gone])
    assert absences.since("m", "") is None
    absences.note([], [starting])
    assert absences.since("n", "") is None
    gone.adapters.known.names = ()
    absences.note([gone], [gone])
    assert absences.since("n", "a") is None
