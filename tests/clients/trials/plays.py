"""Answers of a scripted model, by the name that a request's text has in brackets: `[play:weather]`.

A play is what the model says, one text a turn; its calls are in the demo model's own form.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = re.compile(r"\[play:([a-z-]+)\]")
ANSWER = "A penstock carries water to a turbine."
THOUGHT = "Water falls through it."
WEATHER = "It rains in Oslo."
OLD, NEW = "    return 'hello'\n", "    return 'good day'\n"
PERSON = {"name": "Ada Lovelace", "age": 36}


def call(name: str, /, **arguments: Any) -> str:
    """A call as the demo model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


PLAYS: dict[str, list[str]] = {
    "plain": [ANSWER],
    "thought": [f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"],
    "weather": [call("get_weather", city="Oslo"), WEATHER],
    "two-cities": [call("get_weather", city="Oslo") + "\n" + call("get_weather", city="Paris"), WEATHER],
    "person": [json.dumps(PERSON)],
    "person-call": [call("Person", **PERSON)],
    # litellm's own tool for a type, by the provider anthropic.
    "json-tool-call": [call("json_tool_call", **PERSON)],
    # pydantic-ai's own tool for an answer with a type.
    "weather-report": [call("get_weather", city="Oslo"), call("final_result", city="Oslo", is_wet=True)],
    "shell": [call("exec_command", cmd="cat greeting.txt"), "The file says hello from the shell."],
    "edit": ["greet.py\n```python\n<<<<<<< SEARCH\n" + OLD + "=======\n" + NEW + ">>>>>>> REPLACE\n```\n"],
}
# Where no play is named, as for a title or a summary that a program asks for by itself.
DEFAULT = "Trial of a client."
TURN = "<|im_start|>assistant\n"


def answer_to(prompt: str) -> str:
    """Words of the model to a prompt: the line of the named play for this turn, then always the last one."""
    marks = list(MARK.finditer(prompt))
    if not marks:
        return DEFAULT
    lines = PLAYS.get(marks[-1][1], [DEFAULT])
    turn = prompt.count(TURN, marks[-1].end()) - 1
    return lines[min(max(turn, 0), len(lines) - 1)]
