"""`penstock bench --dataset`: the prompts that are read from files of each form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.dataset import DatasetPrompts
from penstock.cli.bench.target import BenchPrompt
from penstock.common.errors import StartupError


def prompts(path: Path, text: str, number: int, **options: object) -> list[BenchPrompt]:
    path.write_text(text)
    source = DatasetPrompts(BenchConfig(**options), str(path))  # type: ignore[arg-type]
    return [next(source) for _ in range(number)]


def test_all_come_before_one_comes_again_and_a_seed_is_an_order(tmp_path: Path) -> None:
    text = "\n".join(f"line {number}" for number in range(20))
    found = [one.text for one in prompts(tmp_path / "x.txt", text, 40)]
    assert set(found[:20]) == set(found[20:]) == set(text.splitlines())
    assert found[:20] != text.splitlines()
    assert found == [one.text for one in prompts(tmp_path / "x.txt", text, 40)]
    assert found != [one.text for one in prompts(tmp_path / "x.txt", text, 40, seed=1)]


def test_records_of_each_form(tmp_path: Path) -> None:
    conversation = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "how?"},
        {"from": "gpt", "value": "so"},
    ]
    records: list[object] = [
        "plain",
        {"prompt": "a prompt", "output_tokens": 7},
        {"conversations": conversation},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]},
    ]
    wanted = {"plain": (None, 64), "a prompt": (None, 7)}
    for name, text in (
        ("x.json", json.dumps(records)),
        ("x.jsonl", "\n\n".join(json.dumps(one) for one in records)),
    ):
        found = prompts(tmp_path / name, text, 4)
        texts = {one.text: (one.messages, one.output_tokens) for one in found if one.messages is None}
        assert texts == wanted
        assert sorted(one.messages for one in found if one.messages is not None) == [
            [("system", "be"), ("user", "go")],
            [("user", "hi"), ("assistant", "hello"), ("user", "how?")],
        ]


def test_lengths_that_a_record_does_not_say_are_those_of_the_flag(tmp_path: Path) -> None:
    found = prompts(tmp_path / "x.txt", "a\nb", 50, output_tokens="3-5")
    assert {one.output_tokens for one in found} == {3, 4, 5}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.json", "{", "it is not JSON"),
        ("x.json", "[" * 100_000, "it is not JSON"),
        ("x.json", "{}", "a list of records is expected"),
        ("x.json", "[1]", "record 0 is not an object"),
        ("x.json", '["a", {"text": "b"}]', "record 1 has none of `prompt`, `messages` or `conversations`"),
        ("x.json", '[{"prompt": "a", "output_tokens": 0}]', "record 0: output_tokens"),
        ("x.json", '[{"prompt": "a", "output_tokens": true}]', "record 0: output_tokens"),
        ("x.json", '[{"messages": [{"role": "tool", "content": "a"}]}]', "record 0 has none"),
        ("x.json", '[{"conversations": [{"from": "gpt", "value": "a"}]}]', "record 0 has none"),
        ("x.jsonl", '"a"\n{', "line 2 is not JSON"),
        ("x.txt", "\n \n", "it has no prompt"),
    ],
)
def test_what_is_no_dataset_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(StartupError, match=f"--dataset .*{name}: .*{why}") as caught:
        prompts(tmp_path / name, text, 1)
    assert caught.value.flag == "--dataset"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="it is not UTF-8"):
        DatasetPrompts(BenchConfig(), str(path))
