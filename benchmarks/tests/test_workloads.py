"""Flags, counts and comparisons of benchmarks/workloads.py."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from factories.models.model_types import reference_of, tiny_model_type

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.__main__ import parser_of
from benchmarks._report import STDOUT, Table, save
from benchmarks._text_error import TextError
from benchmarks.cells import HEADLINES, WORKLOADS, Workload, figures, medians, tokens_needed
from benchmarks.engines import dtype_of, engine_of
from benchmarks.engines.base import Settings, TextScores, Unsupported
from benchmarks.engines.compressed import quantised_by_us
from benchmarks.engines.gguf_files import PUBLISHED, gguf_file_of
from benchmarks.engines.penstock import PenstockEngine, service_options
from benchmarks.engines.transformers import Generate
from benchmarks.report import best_of_ours, best_peer, markdown, plot_errors, ratio, read, rows_of
from benchmarks.roofline import Machine, Model, ideal
from benchmarks.workloads import skipped

MODEL = Model(body=1000, head=100, layers=2, heads=4, kv_heads=2, head_dim=8, vocab_size=50)


def row(workload: str, engine: str, *speeds: float) -> dict[str, Any]:
    rounds = [{"output_tok_s": speed, "itl_s": 0.01, "peak_rss_bytes": 1e9} for speed in speeds]
    return {"workload": workload, "engine": engine, "median": medians(rounds), "rounds": rounds}


def test_prompts_are_new_every_round_and_share_only_what_they_should() -> None:
    prompts, outputs = WORKLOADS["W6"].requests(1000, seed=0)
    others, _ = WORKLOADS["W6"].requests(1000, seed=1)
    assert outputs == [32] * 32
    assert {len(prompt) for prompt in prompts} == {544}
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 32
    assert prompts[0][:512] != others[0][:512]


def test_the_mixed_workload_is_drawn_once() -> None:
    lengths = WORKLOADS["W5"].lengths
    assert len(lengths) == 64
    assert all(32 <= prompt <= 512 and 16 <= output <= 128 for prompt, output in lengths)
    assert tokens_needed([WORKLOADS["W1"], WORKLOADS["W4"]]) == 2064


def test_figures_of_a_round() -> None:
    workload = Workload("X", "", ((10, 3), (30, 2)))
    found = figures(workload, [[1.0, 1.5, 2.0], [3.0, 4.0]])
    assert found["wall_s"] == 4.0
    assert found["output_tok_s"] == 5 / 4
    assert (found["ttft_s"], found["last_ttft_s"]) == (2.0, 3.0)
    assert found["decode_tok_s"] == pytest.approx((2.0 + 1.0) / 2)
    assert found["prefill_tok_s"] == pytest.approx(40 / 3)


def test_the_ideal_step_reads_its_weights_or_multiplies_whichever_is_more() -> None:
    workload = Workload("X", "", ((1, 3),))
    reading = ideal(workload, MODEL, Machine(1000.0, {"bf16": 1e12}), "bf16")
    kv = MODEL.kv_bytes
    assert reading.prefill == pytest.approx(2 * 1100 / 1000)
    assert reading.decode == pytest.approx((2 * 1100 * 2 + kv * (2 + 3)) / 1000)
    multiplying = ideal(workload, MODEL, Machine(1e12, {"bf16": 100.0}), "bf16")
    assert multiplying.decode == pytest.approx(2 * (2 * 1100) / 100)
    assert multiplying.prefill == pytest.approx((2 * 1100 + MODEL.attention_operations(1, 0)) / 100)


def test_the_ideal_computes_a_common_prefix_once() -> None:
    machine = Machine(1e15, {"bf16": 1000.0})
    apart = ideal(Workload("X", "", ((100, 1),) * 4), MODEL, machine, "bf16")
    shared = ideal(Workload("X", "", ((100, 1),) * 4, common=90), MODEL, machine, "bf16")
    assert shared.prefill < 0.4 * apart.prefill


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v2", "gemma4_text", "gpt_oss"])
def test_numbers_of_other_layers_are_counted_in_the_files(tmp_path: Path, model_type: str) -> None:
    folder = tiny_model_type(tmp_path, model_type)
    config, model = json.loads((folder / "config.json").read_text()), Model.read(folder)
    # Half of the tiny models' experts are chosen.
    parameters = reference_of(folder).named_parameters()
    layers = [
        (name, one.numel()) for name, one in parameters if one.dim() > 1 and not name.startswith(("model.emb", "lm_"))
    ]
    per_row = sum(count // 2 if ".experts." in name else count for name, count in layers if "conv1d" not in name)
    assert (model.body, model.head) == (per_row, config["vocab_size"] * config["hidden_size"])
    if model_type == "qwen3_5_text":
        assert model.layers == config["layer_types"].count("full_attention") < config["num_hidden_layers"]
    if model_type == "deepseek_v2":
        assert model.kv_bytes == 2 * model.layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])


def test_ratios_are_taken_within_a_round_against_the_best_other_engine() -> None:
    rows = [row("W2", "penstock", 10, 40, 12), row("W2", "llamacpp", 9, 9, 9), row("W2", "openvino", 5, 20, 10)]
    by_key = rows_of({"rows": rows})
    column = next(one for one in HEADLINES if one.workload == "W2")
    assert best_peer(by_key, ["penstock", "llamacpp", "openvino"], column) == "openvino"
    assert ratio(by_key, "penstock", "openvino", column) == 2.0
    assert best_peer(by_key, ["penstock"], column) is None


def result(rows: list[dict[str, Any]], failures: dict[str, str]) -> dict[str, Any]:
    """Return the result of a run on no machine in particular."""
    return {
        "environment": {"commit": "abc", "time": "now", "cores": 2, "cpu": "CPU", "load_average": 0.1},
        "settings": {"model": "m", "dtype": "bf16", "threads": 2, "rounds": 1},
        "machine": [],
        "engines": {},
        "failures": failures,
        "rows": rows,
    }


def test_the_report_names_engines_that_took_no_part() -> None:
    rows = [row("W2", "penstock", 20.0), row("W2", "openvino", 10.0)]
    text = markdown(result(rows, {"vllm": "not installed"}))
    assert "| penstock / best other | 2.00 |" in text
    assert "| openvino | **10.0** |" in text
    assert "`vllm` took no part: not installed." in text


def test_the_report_names_the_adapters() -> None:
    found = result([row("W2", "penstock", 20.0)], {})
    assert "LoRA" not in markdown(found)
    found["settings"] |= {"adapters": 8, "adapter_ranks": [8, 16]}
    assert "1 rounds in turns, requests over 8 LoRA adapters of rank 8 and 16;" in markdown(found)


def test_an_engine_without_adapters_refuses_them() -> None:
    settings = Settings("model", "bf16", 1, 64, 64, "cache", adapters=("a", "b"))
    with pytest.raises(Unsupported, match="LoRA"):
        Generate(settings)
    assert [PenstockEngine(settings).adapter(request) for request in range(3)] == [0, 1, 0]


def test_a_run_without_a_row_has_no_empty_table() -> None:
    text = markdown(result([], {"transformers": "leaves out W5 without --include"}))
    assert "|" not in text
    assert "`transformers` took no part: leaves out W5 without --include." in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--rounds", "0"),
        ("--rounds", "two"),
        ("--warmup", "-1"),
        ("--engines", ","),
        ("--workloads", "W9"),
        ("--include", "transformers"),
        ("--include", "transformers:W9"),
    ],
)
def test_wrong_flags_are_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser_of("workloads").parse_args([f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"error: argument {flag}: " in capsys.readouterr().err


def test_a_turn_is_left_out_unless_it_is_included() -> None:
    assert skipped("transformers", "W5", [])
    assert skipped("transformers", "W5", ["transformers:W6"])
    assert not skipped("transformers", "W5", ["transformers:W5"])
    assert not skipped("penstock", "W5", [])


@pytest.mark.parametrize("text", ['{"benchmark": "load", "rows": [{}]}', "[]", "not JSON", None])
def test_the_report_refuses_other_files(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        read(path)
    assert ended.value.code == 2
    assert str(path) in capsys.readouterr().err


def test_results_are_json_values_and_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Table(["figure"], STDOUT).row(1.5)
    save("x", {"settings": {"models": [Path("a/b")], "cold": False, "rounds": 1}}, STDOUT)
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["settings"] == {"models": ["a/b"], "cold": False, "rounds": 1}
    assert found["environment"]["cores"] == len(os.sched_getaffinity(0))
    assert found["environment"]["time"]
    assert shown.err.splitlines() == ["| figure |", "| --- |", "| 1.5 |"]


def test_without_a_file_for_json_the_table_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Table(["figure"], None).row(1.5)
    save("x", {}, None)
    assert capsys.readouterr().out.splitlines() == ["| figure |", "| --- |", "| 1.5 |"]


def test_an_error_is_the_mean_magnitude_and_an_agreement_needs_both() -> None:
    exact = TextScores([-1.0, -2.0, -3.0], [7, 8, 9])
    found = TextError.between(TextScores([-1.5, -2.0, -2.5], [7, 8, 1]), exact)
    assert found.mean == pytest.approx(1 / 3)
    assert found.agreement == pytest.approx(2 / 3)
    assert TextError.between(TextScores([-1.0, -2.0, -3.0], []), exact) == TextError(0.0, None)
    with pytest.raises(ValueError, match="zip"):
        TextError.between(TextScores([-1.0]), exact)


def test_scores_of_logits_are_log_probabilities_of_the_tokens_that_follow() -> None:
    scores = TextScores()
    scores.add_logits(numpy.log(numpy.array([[1, 3], [2, 2], [9, 1]], dtype=numpy.float32)) + 50, [1, 0])
    assert scores.log_probabilities == pytest.approx([math.log(0.75), math.log(0.5)], abs=1e-6)
    assert scores.likeliest == [1, 0]


def with_errors(errors: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a result of engines with such errors."""
    found = result(rows, {})
    found["settings"] |= {"error_tokens": 100, "parameters": 1000}
    about = {"version": "1", "load_seconds": 1.0, "read_seconds": 0.5}
    about |= {"load_peak_rss_bytes": 1e9, "loaded_rss_bytes": 1e9, "weights_bytes": 1000, "agreement": None}
    found["engines"] = {name: {**about, "error": error} for name, error in errors.items()}
    return found


def test_an_engine_is_compared_with_the_fastest_format_of_like_error() -> None:
    errors = {"penstock:int4": 0.3, "penstock:int8": 0.1, "llamacpp:q8_0": 0.095, "vllm:int8": 0.2, "openvino": 0.01}
    speeds = {"penstock:int4": 90.0, "penstock:int8": 60.0, "llamacpp:q8_0": 40.0, "vllm:int8": 50.0, "openvino": 30.0}
    found = with_errors(errors, [row("W2", name, speed) for name, speed in speeds.items()])
    column = next(one for one in HEADLINES if one.workload == "W2")
    by_key = rows_of(found)
    assert best_of_ours(found, by_key, "llamacpp:q8_0", column) == (1.5, "penstock:int8")
    assert best_of_ours(found, by_key, "vllm:int8", column) == (1.2, "penstock:int8")
    # None of ours is as near.
    assert best_of_ours(found, by_key, "openvino", column) is None
    text = markdown(found)
    assert "| penstock:int4 | 0.300 | – | 8.0 | 90.0 |" in text
    assert "| llamacpp:q8_0 | 1.50 (int8) |" in text
    assert "| openvino | 30" not in text.split("Penstock's fastest format")[1]
    assert "/ best other" not in text


def test_processor_time_is_compared_at_like_error() -> None:
    found = with_errors({"penstock:int8": 0.1, "llamacpp:q8_0": 0.1}, [])
    for name, seconds in (("penstock:int8", 2.0), ("llamacpp:q8_0", 3.0)):
        one = row("W2", name, 9.0)
        one["rounds"][0]["processor_s"] = seconds
        found["rows"].append(one | {"median": medians(one["rounds"])})
    shown = markdown(found).split("Processor time")[1]
    assert "| penstock:int8 | 2.0 |" in shown
    assert "| llamacpp:q8_0 | 1.50 (int8) |" in shown
    assert "Processor time" not in markdown(with_errors({"penstock:int8": 0.1}, [row("W2", "penstock:int8", 9.0)]))


def test_speeds_and_bits_are_drawn_over_the_errors(tmp_path: Path) -> None:
    found = with_errors(
        {"penstock:int8": 0.1, "vllm": 0.2}, [row("W2", name, 9.0) for name in ("penstock:int8", "vllm")]
    )
    plot_errors(found, tmp_path / "errors.svg")
    drawn = (tmp_path / "errors.svg").read_text()
    assert drawn.count("<!-- penstock:int8 -->") == drawn.count("<!-- vllm -->") == 2
    assert "<!-- bits a weight -->" in drawn
    assert "<!-- W2 tok/s -->" in drawn


def test_an_engine_may_be_there_with_several_formats() -> None:
    options = parser_of("workloads").parse_args(["--engines", "penstock:int8,penstock:int4,llamacpp:q8_0"])
    assert options.engines == ["penstock:int8", "penstock:int4", "llamacpp:q8_0"]
    assert [engine_of(one) for one in options.engines] == ["penstock", "penstock", "llamacpp"]
    assert [dtype_of(one, "bf16") for one in ("penstock", "llamacpp:q8_0")] == ["bf16", "q8_0"]


def test_a_format_that_penstock_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="int3 weights"):
        service_options(Settings(str(tmp_path), "int3", 1, 64, 64, "cache"))


@pytest.mark.parametrize("dtype", ["quantize-64", "quantize-64-5.5"])
def test_a_folder_that_penstock_makes_is_asked_of_penstock_first(tmp_path: Path, dtype: str) -> None:
    settings = Settings(str(tmp_path / "model"), dtype, 1, 64, 64, str(tmp_path))
    with pytest.raises(Unsupported, match=f"penstock:{dtype} first"):
        quantised_by_us(settings, may_make=False)
    folder = tmp_path / f"model.{dtype}"
    folder.mkdir()
    (folder / "model.safetensors.index.json").touch()
    assert quantised_by_us(settings, may_make=False) == folder


@pytest.mark.parametrize("dtype", ["quantize-", "quantize-x", "quantize-64-", "quantize-64-many"])
def test_an_unknown_form_of_quantize_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(Unsupported, match="quantize-GROUP"):
        quantised_by_us(Settings(str(tmp_path), dtype, 1, 64, 64, str(tmp_path)), may_make=False)


@pytest.mark.parametrize("dtype", ["q3_x", PUBLISHED])
def test_an_unknown_gguf_file_is_refused_by_its_name(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="GGUF"):
        gguf_file_of(Settings(str(tmp_path), dtype, 1, 64, 64, str(tmp_path)))
