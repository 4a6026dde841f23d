"""The command `llm`, unmodified, with extra-openai-models.yaml: prompts, streams, a conversation, a schema, tools."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from plays import PERSON, WEATHER
from trial import IS_SCRIPTED, MODEL, QUESTION, URL, holds, step

home = Path.cwd() / "llm"
home.mkdir()
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: penstock\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: penstock\n"
    "  supports_schema: true\n  supports_tools: true\n"
)
(home / "keys.json").write_text(json.dumps({"penstock": "none"}))
(home / "tools.py").write_text(
    'def get_weather(city: str) -> str:\n    """Tell the weather of a city."""\n    return "rain"\n'
)


def llm(*arguments: str) -> str:
    """Standard output of the command, without the line's end."""
    settings = {**os.environ, "LLM_USER_PATH": str(home)}
    done = subprocess.run(["llm", *arguments], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


PLAIN = ("-m", "penstock", "-o", "temperature", "0", "-o", "max_tokens", "48")


@step("llm models: it is listed")
def _() -> Any:
    (line,) = [line for line in llm("models").splitlines() if "penstock" in line]
    return line


@step("llm PROMPT, streamed and whole: the same text")
def _() -> Any:
    streamed = llm(*PLAIN, QUESTION)
    assert streamed == llm(*PLAIN, "--no-stream", QUESTION)
    return holds(streamed)


@step("llm -c: the conversation goes on")
def _() -> Any:
    return holds(llm(*PLAIN, "-c", "[play:plain] And then?"))


@step("llm -s: a system prompt")
def _() -> Any:
    return holds(llm(*PLAIN, "-s", "Be brief.", QUESTION))


@step("llm --schema: the answer obeys it")
def _() -> Any:
    asked = ("-m", "penstock", "-o", "temperature", "0", "-o", "max_tokens", "300", "--schema", "name, age int")
    found = json.loads(llm(*asked, "[play:person] Tell of one person: a name and an age."))
    assert isinstance(found["name"], str), found
    assert isinstance(found["age"], int), found
    assert not IS_SCRIPTED or found == PERSON
    return found


@step("llm --functions: the tool is called, its result answered", only="scripted")
def _() -> Any:
    tools = ("--functions", str(home / "tools.py"))
    return holds(llm("-m", "penstock", *tools, "[play:weather] Weather in Oslo?"), WEATHER)


@step("llm logs: the tokens are told")
def _() -> Any:
    (last,) = json.loads(llm("logs", "-n", "1", "--json"))
    assert last["input_tokens"], last
    return f"{last['input_tokens']} in, {last['output_tokens']} out"
