"""`penstock infer --endpoint`: a stack's answers are those of the model in this process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Stack
from penstock.cli.infer.command import run_infer
from penstock.cli.infer.config import InferConfig
from penstock.cli.infer.line_batch import SOME_FAILED, LineBatch
from penstock.cli.infer.targets import LocalTarget
from penstock.common.checkpoint import demo_folder
from penstock.common.config import from_env_and_flags
from penstock.common.errors import NotFound

LINES = ["What is Penstock?", "The capital of France is", "1 + 1 =", "Zoë said: 你好", "Does it need a GPU?"] * 4
# A prompt of more tokens than the context has.
LONG = "word " * 5000


@pytest.fixture(scope="module")
def local() -> Any:
    engine = {"kv_memory": "16MiB", "threads": "1", "dtype": "float32", "tune_seconds": "0"}
    with LocalTarget(from_env_and_flags(InferConfig, {}), engine) as target:
        yield target


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": "false"},
        {"seed": "5", "temperature": "1.0"},
        {"seed": "5", "with_prompt": "true", "others": ["num_return_sequences=2"]},
        {"do_sample": "false", "guidance_scale": "1.5", "negative_prompt": "A sad poem:"},
    ],
    ids=["greedy", "sampled", "with prompt", "guidance"],
)
def test_an_endpoint_gives_the_answers_of_this_process(
    stack: Stack, local: LocalTarget, tmp_path: Path, given: dict[str, Any]
) -> None:
    data = tmp_path / "data.txt"
    data.write_bytes("\n".join([*LINES, LONG]).encode() + b"\n\xff\n")
    asked = {"data_file": str(data), "max_new_tokens": "8", **given}
    here, there = tmp_path / "here" / "a.json", tmp_path / "there" / "a.json"
    assert (
        LineBatch(from_env_and_flags(InferConfig, {**asked, "predictions_file": str(here)}), local).run() == SOME_FAILED
    )
    # The tokenizer that writes the ends of an answer is the local one, as in this process.
    remote = {**asked, "endpoint": stack.address, "base_model": str(demo_folder()), "predictions_file": str(there)}
    assert run_infer(remote) == SOME_FAILED
    mine, theirs = (json.loads(path.read_text("utf-8")) for path in (here, there))
    assert [one["Output"] for one in mine] == [one["Output"] for one in theirs]
    assert ["Error" in one for one in mine] == ["Error" in one for one in theirs] == [*[False] * len(LINES), True, True]
    assert len({str(one["Output"]) for one in mine}) > 4
    assert (
        here.with_name("generation_config.json").read_bytes() == there.with_name("generation_config.json").read_bytes()
    )


def test_a_model_that_the_endpoint_does_not_have(stack: Stack, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        run_infer({"endpoint": stack.address, "model": "another", "predictions_file": str(tmp_path / "a.json")})


def test_a_conversation_with_an_endpoint(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a tokenizer here the endpoint's answers tell the turns' tokens, and old turns leave by these."""
    saved = tmp_path / "turns.json"
    typed = ["What is Penstock?", "Does it need a GPU?", "And a CPU?", "!status", f"!save {saved}", "!quit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
    asked = {"endpoint": stack.address, "interactive": "true", "max_new_tokens": "24", "history_tokens": "60"}
    assert run_infer({**asked, "do_sample": "false"}) == 0
    shown = capsys.readouterr().out
    assert "old turns are no longer seen" in shown
    assert "turns    3; the next one sees" in shown
    assert [one["Input"] for one in json.loads(saved.read_text("utf-8"))] == typed[:3]
