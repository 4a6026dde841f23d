"""docs/learn/rooms.md is true: every file has a room, imports go down and not in circles, light rooms are light."""

from __future__ import annotations

import subprocess
import sys

import pytest
from factories.source_tree import PACKAGE, circles, imports, modules, room_of, rooms


def test_every_file_has_a_room_and_every_room_a_file() -> None:
    homeless = [module for module in modules() if "." in module and room_of(module) is None]
    empty = {room.name for room in rooms()} - {room.name for module in modules() if (room := room_of(module))}
    assert not homeless
    assert not empty


def test_imports_go_down() -> None:
    upward = []
    for module, others in imports().items():
        for other in others:
            above, below = room_of(module), room_of(other)
            if above and below and below.order < above.order:
                upward.append(f"{module} -> {other}")
    assert not upward


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circles(imports())


def test_no_file_imports_itself() -> None:
    assert not [module for module, others in imports().items() if module in others]


def test_a_circle_would_be_seen() -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"}), "d": frozenset()}
    assert circles(graph) == [["b", "c"]]


def test_the_top_of_generation_is_a_short_list() -> None:
    assert len(list((PACKAGE / "generation").glob("*.py"))) <= 8


# Imports modules one after the other, and ends with the name of the first with which something heavy came.
_IMPORT = """
import importlib, sys
heavy, modules = {heavy!r}, {modules!r}
for module in modules:
    importlib.import_module("penstock." + module)
    if heavy & sys.modules.keys():
        sys.exit(module)
"""


@pytest.mark.parametrize("of_router", [False, True])
def test_light_rooms_never_import_torch(of_router: bool) -> None:
    """A process for all of them: what one of them may not import, none of them may."""
    light = {room.name for room in rooms() if not room.may_have_torch and room.name.startswith("router") == of_router}
    inside = [module for module in modules() if (own := room_of(module)) and own.name in light]
    assert inside
    heavy = {"torch", "transformers", "tokenizers"} if of_router else {"torch"}
    code = _IMPORT.format(heavy=heavy, modules=inside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
