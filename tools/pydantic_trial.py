"""Trial of structured output on a real model: schemas of pydantic models, answered greedily, judged by jsonschema and pydantic.

    python tools/pydantic_trial.py MODEL [--count 200] [--first 0] [--tokens 700] [--show]

MODEL is a folder or a GGUF file with a chat template. Each model of tests/factories/wire/pydantic_models.py is asked for once. An
answer is right when it ended by itself, obeys the schema with its formats, and is a value of the model. Prints what is not, and a
table; exit status 1 where one answer was not right.
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

from factories.wire.pydantic_models import fault_of, model_of
from penstock import Generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--settings", type=json.loads, default={}, help="x-guidance of every schema, as JSON")
    parser.add_argument("--show", action="store_true", help="print every answer")
    chosen = parser.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.count)
    found: collections.Counter[str] = collections.Counter()
    lengths = []
    with Generator(chosen.model) as model:
        started = time.monotonic()
        requests = [_request(number, chosen.tokens, chosen.settings) for number in numbers]
        for index, answer in model.generate_each(requests):
            number = numbers[index]
            if isinstance(answer, Exception):
                raise answer
            one = answer
            fault = "not ended" if one.finish_reason.startswith("length") else fault_of(model_of(number), one.text)
            found[fault.partition(":")[0] or "right"] += 1
            lengths.append(len(one.token_ids))
            if fault or chosen.show:
                print(number, len(one.token_ids), fault or "right", json.dumps(one.text)[:1500], flush=True)
        seconds = time.monotonic() - started
    print(f"{dict(found)}; tokens: {sum(lengths)}, median {statistics.median(lengths)}, most {max(lengths)}; {seconds:.0f} s")
    sys.exit(found["right"] != chosen.count)


def _request(number: int, tokens: int, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    schema = model_of(number).model_json_schema()
    asked = f"Write one example record as JSON that obeys this schema:\n{json.dumps(schema)}"
    options = {"json_schema": {"x-guidance": settings, **schema}, "max_new_tokens": tokens, "do_sample": False}
    return [{"role": "user", "content": asked}], options


if __name__ == "__main__":
    main()
