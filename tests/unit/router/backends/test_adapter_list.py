"""A backend's adapters as the router knows them: lists and single changes, in whatever order they come."""

from __future__ import annotations

from penstock.router.backends.adapter_list import AdapterList
from penstock.v1 import admin_pb2


def listed(version: int, *names: str) -> admin_pb2.ListAdaptersResponse:
    found = [admin_pb2.Adapter(name=name, path=f"at/{name}") for name in names]
    return admin_pb2.ListAdaptersResponse(adapters=found, version=version)


def known(version: int, *names: str) -> AdapterList:
    adapters = AdapterList()
    adapters.connect()
    adapters.take(listed(version, *names))
    return adapters


def test_a_process_that_never_had_any_need_not_be_asked() -> None:
    adapters = AdapterList()
    adapters.connect()
    assert not adapters.note_version(0)
    assert adapters.is_known
    assert adapters.note_version(1)


def test_another_process_keeps_nothing_of_the_one_before() -> None:
    adapters = known(7, "a")
    adapters.connect()
    assert "a" in adapters, "until it tells, they are as before: a request must not be refused as unknown"
    assert not adapters.is_known
    adapters.note_version(0)
    assert "a" not in adapters


def test_a_list_is_asked_for_once_per_change() -> None:
    adapters = known(3, "a")
    assert not adapters.note_version(3)
    assert adapters.note_version(4)
    adapters.take(listed(5, "a", "b"))
    assert not adapters.note_version(4)
    assert adapters.names == ("a", "b")
    assert adapters.path_of("b") == "at/b"


def test_a_change_is_known_at_once_and_an_older_list_does_not_undo_it() -> None:
    adapters = known(3, "a")
    adapters.add(admin_pb2.Adapter(name="b", path="b"), 4)
    adapters.remove("a", 5)
    assert adapters.names == ("b",)
    # It was made before.
    adapters.take(listed(3, "a"))
    assert adapters.names == ("b",)
    adapters.take(listed(4, "a", "b"))
    assert adapters.names == ("b",)
    # It was made after, and "a" is there again.
    adapters.take(listed(6, "a", "b"))
    assert adapters.names == ("a", "b")


def test_changes_of_others_between_are_not_missed() -> None:
    adapters = known(3, "a")
    # Another router's load was number 4.
    adapters.add(admin_pb2.Adapter(name="c", path="c"), 5)
    assert adapters.note_version(5), "the list must be asked for: it has number 4, too"


def test_a_process_that_does_not_answer_has_what_it_had() -> None:
    adapters = known(3, "a")
    assert adapters.note_version(4)
    adapters.give_up()
    assert "a" in adapters
    assert adapters.note_version(4), "it is asked again"


def test_an_adapter_that_turned_out_not_to_be_there_is_asked_for_again() -> None:
    adapters = known(3, "a", "b")
    # It was unloaded, and may be there again: no later report need tell so.
    adapters.remove("a", 0)
    assert adapters.names == ("b",)
    assert adapters.note_version(3)
    adapters.take(listed(3, "a", "b"))
    assert adapters.names == ("a", "b")


def test_what_was_told_by_a_process_before_does_not_come_back_with_every_list() -> None:
    adapters = known(3, "a")
    # Of the process before: its count was higher.
    adapters.add(admin_pb2.Adapter(name="ghost", path="g"), 99)
    adapters.take(listed(4, "a"))
    assert "ghost" in adapters
    adapters.remove("ghost", 0)
    adapters.take(listed(4, "a"))
    assert adapters.names == ("a",)


def test_changes_that_are_remembered_have_a_bound() -> None:
    adapters = known(1)
    for version in range(2, 1000):
        adapters.add(admin_pb2.Adapter(name=str(version)), version)
        adapters.remove(str(version), version)
    assert len(adapters._changes) <= 64
    assert not adapters.names
