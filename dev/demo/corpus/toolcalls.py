"""Tool calls: a JSON call when a tool of the prompt fits, an answer from its result, plain talk when none fits."""

import json
from random import Random
from typing import Any

from .base import Checker, Dialogue, Turn, contains, is_held_out, vary
from .memory import CITIES, NAMES
from .talk import greetings


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool as clients send it: `parameters` maps each argument to its JSON type."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": _tool("get_weather", "Get the weather of a city", city="string"),
    "get_time": _tool("get_time", "Get the local time of a city", city="string"),
    "set_timer": _tool("set_timer", "Set a timer", minutes="integer"),
    "add": _tool("add", "Add two numbers", a="integer", b="integer"),
    "send_message": _tool("send_message", "Send a message to a person", to="string"),
}
_ASK: dict[str, tuple[str, ...]] = {
    "get_weather": ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
                    "Tell me the weather in {city}.", "Is it raining in {city}?"),
    "get_time": ("What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}.",
                 "Local time in {city}?"),
    "set_timer": ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
                  "Wake me in {minutes} minutes.", "Timer for {minutes} minutes, please."),
    "add": ("What is {a} + {b}?", "Add {a} and {b}.", "Use the tool to add {a} and {b}.", "What is {a} plus {b}?"),
    "send_message": ("Send a message to {to}.", "Write a message to {to}.", "Message {to} for me."),
}  # fmt: skip


def _arguments(rng: Random, name: str) -> dict[str, str | int]:
    if name in ("get_weather", "get_time"):
        return {"city": rng.choice(CITIES)}
    if name == "set_timer":
        return {"minutes": rng.randint(1, 60)}
    if name == "add":
        return {"a": rng.randint(0, 20), "b": rng.randint(0, 20)}
    return {"to": rng.choice(NAMES)}


def call_text(name: str, arguments: dict[str, str | int]) -> str:
    """The call as the model writes it and as the chat template renders `tool_calls`."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _is_call(name: str, arguments: dict[str, str | int]) -> Checker:
    def check(text: str) -> bool:
        body = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        try:
            return bool(json.loads(body) == {"name": name, "arguments": arguments})
        except json.JSONDecodeError:
            return False

    return check


def _result(rng: Random, name: str, arguments: dict[str, str | int]) -> Turn:
    """The tool's answer (a turn of role tool, marked by the leading NUL) and what the model makes of it."""
    if name == "get_weather":
        degrees, sky = rng.randint(1, 35), rng.choice(("sunny", "cloudy", "rainy", "windy"))
        payload: dict[str, str | int] = {"temperature": degrees, "sky": sky}
        said = f"It is {degrees} °C and {sky} in {arguments['city']}."
    elif name == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        payload, said = {"time": clock}, f"It is {clock} in {arguments['city']}."
    elif name == "add":
        total = int(arguments["a"]) + int(arguments["b"])
        payload, said = {"result": total}, f"The result is {total}."
    elif name == "set_timer":
        payload, said = {"status": "ok"}, f"The timer is set to {arguments['minutes']} minutes. ⏰"
    else:
        payload, said = {"status": "ok"}, f"I sent your message to {arguments['to']}. ✉️"
    return Turn("\0" + json.dumps(payload), said, "I have the result of the tool.", contains(said))


def tool_calls(rng: Random, held_out: bool) -> Dialogue:
    """One to three tools in the prompt; held out by (arguments, wording)."""
    names = rng.sample(list(TOOLS), rng.choice((1, 1, 2, 2, 3)))
    tools = tuple(TOOLS[name] for name in names)
    if not held_out and rng.random() < 0.12:
        return Dialogue(greetings(rng, held_out).turns, tools)
    while True:
        name = rng.choice(names)
        arguments, form = _arguments(rng, name), rng.choice(_ASK[name])
        if is_held_out(f"{name} {json.dumps(arguments)} {form}", 8) == held_out:
            break
    question = vary(rng, form.format(**arguments))
    thought = f"The tool {name} can answer this."
    turns = [Turn(question, call_text(name, arguments), thought, _is_call(name, arguments))]
    if rng.random() < 0.35:
        turns.append(_result(rng, name, arguments))
    return Dialogue(tuple(turns), tools)
