"""`penstock eval` on the embedded model: formats in this process and a running stack, beside transformers' float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Stack
from penstock.cli.evaluate.eval_command import run_eval
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError

TEXT = (
    "Penstock runs on CPUs today, and on CUDA and Ascend by the same code. Every decoding mode and every option can be "
    "chosen per request. All requests share one continuous batch and one paged pool of keys and values. "
) * 12


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return str(file)


def evaluated(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    run_eval({"json": str(file), "quiet": "true", "tokens": "400", "context": "96", "chunk": "32", **flags})
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_formats_beside_transformers(tmp_path: Path, text: str) -> None:
    picture = tmp_path / "formats.svg"
    formats = "float32,bfloat16,bfloat16+int8,bfloat16+int4"
    report = evaluated(tmp_path, text_file=text, format=formats, plot=str(picture))
    exact, half, int8, int4 = report["rows"]
    assert report["tokens"] == 400 - report["documents"]
    assert exact["mean"] < 1e-4
    assert exact["agreement"] == 1.0
    assert exact["mean"] < half["mean"] < int8["mean"] < int4["mean"] < 3.0
    assert exact["kl"] < half["kl"] < int8["kl"] < int4["kl"]
    assert exact["perplexity"] == pytest.approx(report["reference_perplexity"], rel=1e-4)
    assert exact["weight_bytes"] > half["weight_bytes"] > int4["weight_bytes"]
    assert picture.read_text().startswith("<?xml")
    assert "bfloat16+int8" in picture.read_text()


def test_a_saved_reference_has_its_text_and_gives_the_same_figures(tmp_path: Path, text: str) -> None:
    saved = str(tmp_path / "exact.safetensors")
    first = evaluated(tmp_path, text_file=text, format="bfloat16", save_reference=saved)
    again = evaluated(tmp_path, reference=saved, format="bfloat16")
    for one in (*first["rows"], *again["rows"]):
        del one["seconds"]
    assert again["rows"] == first["rows"]
    assert again["reference"] == first["reference"] == "penstock-demo, transformers"


def test_a_format_of_ours_as_the_reference(tmp_path: Path, text: str) -> None:
    row = evaluated(tmp_path, text_file=text, reference="bfloat16", format="bfloat16")["rows"][0]
    assert (row["mean"], row["agreement"], row["kl"], row["perplexity_ratio"]) == (0.0, 1.0, 0.0, 1.0)


def test_a_running_stack_reads_as_the_model_does_here(tmp_path: Path, text: str) -> None:
    with Stack() as stack:
        served = evaluated(tmp_path, text_file=text, endpoint=stack.address)
    row = served["rows"][0]
    here = evaluated(tmp_path, text_file=text, format="auto", top="20")["rows"][0]
    assert row["endpoint"] == stack.address
    assert row["mean"] == pytest.approx(here["mean"], rel=0.1)
    assert row["kl"] == pytest.approx(here["kl"], rel=0.1)
    assert row["agreement"] == pytest.approx(here["agreement"], abs=0.02)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, "--text-file is missing"),
        ({"text_file": "/no/such"}, "--text-file /no/such"),
        ({"text_file": "TEXT", "max_text_bytes": "10"}, "--max-text-bytes 10"),
        ({"text_file": "TEXT", "tokens": "100000", "max_reading_bytes": "1MiB"}, "--max-reading-bytes"),
        ({"text_file": "TEXT", "format": "int8+int4"}, "--format"),
        ({"text_file": "TEXT", "format": "int7"}, "--format 'int7'"),
        ({"text_file": "TEXT", "reference": "int7"}, "--reference 'int7'"),
        ({"text_file": "TEXT", "reference": "a.safetensors"}, "--text-file"),
        ({"reference": "/no/such.safetensors"}, "--reference /no/such.safetensors"),
        ({"text_file": "TEXT", "save_reference": "a.txt"}, "--save-reference a.txt"),
        ({"text_file": "TEXT", "plot": "a.bmp"}, "--plot a.bmp"),
        ({"text_file": "TEXT", "json": "/no/such/a.json"}, "--json /no/such/a.json"),
        ({"text_file": "TEXT", "token_file": "x"}, "--token-file is for an --endpoint"),
        ({"text_file": "TEXT", "endpoint": "127.0.0.1:1", "format": "int8"}, "--format is for a model"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, str], named: str, text: str) -> None:
    asked = {name: text if value == "TEXT" else value for name, value in flags.items()}
    with pytest.raises(StartupError) as caught:
        run_eval(asked)
    assert named in caught.value.message


def test_a_model_that_transformers_cannot_read_is_told_with_the_way_out(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nothing"}')
    (folder / "tokenizer.json").write_bytes((demo_folder() / "tokenizer.json").read_bytes())
    with pytest.raises(StartupError, match=r"--reference transformers: .*--reference-model"):
        run_eval({"model": str(folder), "text_file": text, "quiet": "true"})
