"""Trial of calls that a real model chooses to make: tools with random schemas, `auto`, judged by jsonschema.

    python tools/held_calls_trial.py MODEL [--count 200] [--first 0] [--tokens 400] [--loose] [--show]

MODEL is a folder or a GGUF file with a chat template. Each model of tests/factories/wire/pydantic_models.py gives the
parameters of one tool. Nothing forces a call: the conversation shows one, and the model begins its own, or does not. A
call that begins is right when it is one of the tool, whole, and its arguments obey the schema with its formats; it
ended by itself, or was closed at the limit of tokens. `--loose`: tools without strict, their arguments need only be
JSON. Prints what is not right, and a table; exit status 1 where a call was not right, or where none began.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from factories.wire.pydantic_models import fault_of, model_of
from penstock import Generator

# Requests at a time.
AT_ONCE = 32
EXAMPLE = '<tool_call>\n{"name": "save_city", "arguments": {"name": "Oslo", "people": 717710}}\n</tool_call>'
SYSTEM = (
    "You call tools. Write nothing but one call, between <tool_call> and </tool_call>, with the tool's name and its "
    "arguments as JSON."
)


def conversation(name: str) -> list[dict[str, str]]:
    """Return a conversation that asks for a call of the tool `name`, after an example of another."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Call save_city once, with arguments of your choice."},
        {"role": "assistant", "content": EXAMPLE},
        {"role": "user", "content": f"Call {name} once, with arguments of your choice."},
    ]


def fault_in(answer: Any, number: int, *, is_strict: bool) -> str:
    """Return what is wrong with an answer's calls; empty: nothing, or there are none."""
    choice = answer.choices[0]
    if "<tool_call>" in choice.text:
        return "not read: a call began, and is text"
    for call in choice.tool_calls:
        if call.name != tool_of(number, is_strict=is_strict)["name"]:
            return f"another tool: {call.name}"
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return "no JSON: of the arguments"
        if not isinstance(arguments, dict):
            return "no object: the arguments"
        if is_strict and (fault := fault_of(model_of(number), call.arguments)):
            return fault
    return ""


def tool_of(number: int, *, is_strict: bool) -> dict[str, Any]:
    """Return the tool with the parameters of a model."""
    schema = model_of(number).model_json_schema()
    return {"name": f"save_{number}", "parameters": schema, "strict": is_strict}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--loose", action="store_true", help="tools without strict")
    parser.add_argument("--show", action="store_true", help="print every answer")
    chosen = parser.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.count)
    is_strict = not chosen.loose
    found: collections.Counter[str] = collections.Counter()
    lengths: list[int] = []
    started = time.monotonic()
    with Generator(chosen.model) as model, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(number: int) -> Any:
            tool = tool_of(number, is_strict=is_strict)
            asked = conversation(tool["name"])
            try:
                return model.generate(asked, tools=[tool], max_new_tokens=chosen.tokens, do_sample=False)
            except Exception as error:  # a refusal is a result
                return error

        for number, answer in zip(numbers, threads.map(ask, numbers), strict=True):
            if isinstance(answer, Exception):
                fault = f"refused: {answer}"
            else:
                fault = fault_in(answer, number, is_strict=is_strict)
                lengths.append(len(answer.token_ids))
                calls = answer.choices[0].tool_calls
                if calls or fault:
                    found["calls"] += max(1, len(calls))
                    found["closed at the limit" if answer.finish_reason == "LENGTH" else "ended by itself"] += 1
                else:
                    found["without a call"] += 1
            if fault:
                found[fault.partition(":")[0]] += 1
            if fault or chosen.show:
                shown = "" if isinstance(answer, Exception) else f"{answer.text!r} {answer.choices[0].tool_calls!r}"
                print(number, fault or "right", shown[:1500], flush=True)
            found["right"] += not fault
    spent = time.process_time()
    print(
        f"{dict(found)}; tokens: {sum(lengths)}, median {statistics.median(lengths or [0])}, "
        f"{time.monotonic() - started:.0f} s, {spent:.0f} s of processor"
    )
    sys.exit(found["right"] != len(numbers) or not found["calls"])


if __name__ == "__main__":
    main()
