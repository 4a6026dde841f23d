"""Trial of structured output on a real model: schemas of pydantic models, answered greedily, judged by jsonschema.

    python tools/pydantic_trial.py MODEL [--count 200] [--first 0] [--tokens 1200] [--settings '{"max_items": 4}']
    python tools/pydantic_trial.py MODEL --numbers 6 7

MODEL is a folder or a GGUF file with a chat template. Each model of tests/factories/wire/pydantic_models.py is asked
for once. An answer is right when it obeys the schema with its formats: it ended by itself, or was closed at the limit
of tokens, and these are counted apart. Prints what is not right, what pydantic refuses though its schema allows it, and
a table; exit status 1 where one answer was not right.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from factories.wire.pydantic_models import fault_of, model_of, refusal_of
from penstock import Generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--numbers", type=int, nargs="+", help="only these models")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--settings", type=json.loads, default={}, help="x-guidance of every schema, as JSON")
    parser.add_argument("--show", action="store_true", help="print every answer")
    chosen = parser.parse_args()
    numbers = chosen.numbers or range(chosen.first, chosen.first + chosen.count)
    found: collections.Counter[str] = collections.Counter()
    lengths = []
    started = time.monotonic()
    with Generator(chosen.model) as model:
        requests = [_request(number, chosen.tokens, chosen.settings) for number in numbers]
        for index, answer in model.generate_each(requests):
            number, text, length = numbers[index], "", 0
            if isinstance(answer, Exception):
                fault = f"refused: {answer}"
            else:
                text, length = answer.text, len(answer.token_ids)
                fault = fault_of(model_of(number), text)
                found["closed at the limit" if answer.finish_reason == "LENGTH" else "ended by itself"] += 1
            found[fault.partition(":")[0] or "right"] += 1
            lengths.append(length)
            refusal = "" if fault else refusal_of(model_of(number), text)
            found["of these refused by pydantic"] += bool(refusal)
            if fault or refusal or chosen.show:
                print(number, length, fault or f"pydantic: {refusal}", json.dumps(text)[:1500], flush=True)
    median, most = statistics.median(lengths), max(lengths)
    print(f"{dict(found)}; tokens: {sum(lengths)}, median {median}, most {most}; {time.monotonic() - started:.0f} s")
    sys.exit(found["right"] != len(numbers))


def _request(number: int, tokens: int, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    schema = model_of(number).model_json_schema()
    asked = f"Write one example record as JSON that obeys this schema:\n{json.dumps(schema)}"
    options = {"json_schema": {"x-guidance": settings, **schema}, "max_new_tokens": tokens, "do_sample": False}
    return [{"role": "user", "content": asked}], options


if __name__ == "__main__":
    main()
