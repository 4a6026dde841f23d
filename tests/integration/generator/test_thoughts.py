"""Thoughts of a real model in this process, whose template ends the prompt inside one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from penstock import Generator
from penstock.common.checkpoint import demo_folder

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": True},
    "max_new_tokens": 200,
    "do_sample": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    shutil.copytree(demo_folder(), folder, dirs_exist_ok=True)
    template = folder / "chat_template.jinja"
    before, begin, after = template.read_text().rpartition("    {{- '<|im_start|>assistant\\n' -}}\n")
    assert begin
    template.write_text(f"{before}{begin}    {{%- if asks_thought -%}}{{{{- '<think>\\n' -}}}}{{%- endif -%}}\n{after}")
    with local_generator(folder) as made:
        yield made


@pytest.mark.parametrize(
    ("constraint", "form"),
    [
        ({"regex": "[0-9]{1,3}!"}, "[0-9]{1,3}!"),
        ({"choice": ["five", "six"]}, "five|six"),
        ({"json_schema": {"type": "integer"}}, "-?[0-9]+"),
        ({"grammar": 'start: "It is " /[0-9]/'}, "It is [0-9]"),
    ],
)
def test_the_thought_is_the_models_own_and_the_answer_the_constraints(
    model: Generator, constraint: dict[str, Any], form: str
) -> None:
    (free,) = model.generate(QUESTION, **THINKING).choices
    assert free.reasoning
    (bound,) = model.generate(QUESTION, **THINKING, **constraint).choices
    assert bound.reasoning == free.reasoning
    assert re.fullmatch(form, bound.text)


def test_a_stop_string_in_the_thought_stops_nothing(model: Generator) -> None:
    (free,) = model.generate(QUESTION, **THINKING).choices
    word = free.reasoning.split()[0]
    assert word not in free.text
    (stopped,) = model.generate(QUESTION, **THINKING, stop_strings=[word, free.text[-2:]]).choices
    assert stopped.reasoning == free.reasoning
    assert (stopped.text, stopped.finish_reason) == (free.text[:-2], "STOP_STRING")
