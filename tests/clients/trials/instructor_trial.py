"""instructor, unmodified: a pydantic model as the answer, by its modes that a server can be asked in."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from plays import PERSON
from pydantic import BaseModel
from trial import IS_SCRIPTED, MODEL, URL, asked, step

# Mode -> the play that answers it.
MODES = {"TOOLS": "person-call", "TOOLS_STRICT": "person-call", "JSON": "person", "JSON_SCHEMA": "person"}


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def trials(mode: str, play: str) -> None:
    """A whole answer and a partial one in a mode."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300), mode=instructor.Mode[mode]
    )
    common: Any = {
        "model": MODEL,
        "messages": asked(play, "Tell of one person: a name and an age in years, as JSON."),
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
    }

    @step(f"create, {mode}", only="" if mode != "JSON" else "scripted")
    def _() -> Any:
        found: Any = client.create(response_model=Person, **common)
        assert not IS_SCRIPTED or found.model_dump() == PERSON, found
        return repr(found)

    @step(f"create_partial, {mode}", only="" if mode != "JSON" else "scripted")
    def _() -> Any:
        # Partial answers are checked by the library itself as they grow.
        found: Any = list(client.create_partial(response_model=Person, **common))
        assert not IS_SCRIPTED or found[-1].model_dump() == PERSON, found[-1]
        return f"{len(found)} states, {found[-1].model_dump()}"


for name, answered in MODES.items():
    trials(name, answered)
