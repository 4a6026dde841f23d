"""Parts that every trial of a client shares: where the server is, steps that are right or wrong, and how they are told.

    python SOMETHING_trial.py URL MODEL scripted|real

Each step is a line of JSON: what the program did, what it saw, and whether that is right. With a real model a step
holds what must be true of any answer; with scripted ones the answer itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from plays import ANSWER

URL, MODEL = sys.argv[1], sys.argv[2]
IS_SCRIPTED = sys.argv[3] == "scripted"
QUESTION = "[play:plain] What is a penstock? Answer in one sentence."
# A name of any length is one that a small model may not come to the end of.
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


def asked(play: str, text: str) -> list[Any]:
    """Messages of one question that names a play."""
    return [{"role": "user", "content": f"[play:{play}] {text}"}]


def write_outcome(did: str, seen: Any, *, right: bool) -> None:
    """Write one step's outcome."""
    print(json.dumps({"did": did, "seen": str(seen)[:200], "right": right}), flush=True)


def step(did: str, *, only: str = "") -> Callable[[Callable[[], Any]], None]:
    """Run a function at once as a step: what it returns was seen, what it raises is wrong.

    `only`: "scripted" for what a real model may choose not to do, "real" for what a scripted one cannot.
    """

    def run(function: Callable[[], Any]) -> None:
        if only and (only == "scripted") != IS_SCRIPTED:
            return
        try:
            seen = function()
            seen = asyncio.run(seen) if inspect.iscoroutine(seen) else seen
        except Exception as error:
            traceback.print_exc()
            write_outcome(did, f"{type(error).__name__}: {error}", right=False)
        else:
            write_outcome(did, seen, right=True)

    return run


def holds(text: str | None, wanted: str = ANSWER) -> str:
    """An answer's text: what was scripted, or something from a real model."""
    assert text, "no text"
    assert not IS_SCRIPTED or text == wanted, text
    return text


def city_of(arguments: Any) -> str:
    """The city that a call names."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(arguments) == {"city"}, arguments
    assert arguments["city"] in (["Oslo"] if IS_SCRIPTED else ["Oslo", "Paris"]), arguments
    return f"get_weather({arguments['city']!r})"
