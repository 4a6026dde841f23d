"""MindIE's model_config, row by row: accepted values, coercion, defaults and the texts of errors."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from penstock.common.errors import StartupError
from penstock.compat.mindie import GeneratorTorch
from penstock.compat.mindie import model_settings as model_settings
from penstock.compat.mindie.model_settings import ROWS, ModelConfigError, ModelSettings, with_model_config

REQUIRED: dict[str, Any] = {"backend_type": "torch", "world_size": 1, "rank": 0, "npu_device_id": 0, "local_rank": 0}
NAMES = tuple(row.name for row in ROWS)


def read(num_devices: int = 1, **changed: Any) -> ModelSettings:
    """Read the required fields with some changes; a value of ... leaves the field out."""
    values = {name: value for name, value in {**REQUIRED, **changed}.items() if value is not ...}
    return ModelSettings.read(values, num_devices=num_devices)


def error_of(num_devices: int = 1, **changed: Any) -> str:
    with pytest.raises(ModelConfigError) as caught:
        read(num_devices, **changed)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_model_in_place_of_the_dictionary_is_told_what_takes_it() -> None:
    with pytest.raises(TypeError, match=r"^model_config: must be a dictionary; .* penstock\.Generator"):
        GeneratorTorch("some/folder")  # type: ignore[arg-type]


def test_the_rows_are_the_fields() -> None:
    assert tuple(field.name for field in fields(ModelSettings)) == NAMES
    assert {row.name for row in ROWS if row.is_required} == REQUIRED.keys()


ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "backend_type": [("torch", "torch")],
    "world_size": [(1, 1), ("2", 2), (1_048_576, 1_048_576), ("4.0", 4), (2.0, 2)],
    "rank": [(0, 0), ("0", 0)],
    "npu_device_id": [(0, 0), ("3", 3), (7, 7)],
    "local_rank": [(0, 0), ("2", 2)],
    "num_threads": [(1, 1), ("16", 16), (None, 8), (..., 8)],
    "trust_remote_code": [
        *((True, True), ("true", True), ("1", True), ("True", True), (1, True)),
        *((False, False), ("false", False), ("0", False), (0, False), (None, False), (..., False)),
    ],
    "model_name": [("Qwen2.5-0.5B_x", "Qwen2.5-0.5B_x"), ("a", "a"), ("a" * 256, "a" * 256), (None, None), (..., None)],
    "inference_mode": [("splitfuse", "splitfuse"), (None, None), (..., None)],
    "max_position_embeddings": [(1, 1), ("4096", 4096), (None, None), (..., None)],
    "load_tokenizer": [(False, False), ("false", False), ("1", True), (None, True), (..., True)],
    "tokenizer_path": [("/models/t", "/models/t"), (None, None), (..., None)],
    "model_id": [("owner/name", "owner/name"), (None, None), (..., None)],
    "block_size": [(128, 128), ("16", 16), (..., None)],
    "npu_mem": [(-1, -1), ("4", 4), (..., None)],
    "cpu_mem": [(0, 0), ("5", 5), (..., None)],
}
_NUMBER, _TRUTH, _TEXT = "must be a whole number, found", "must be true or false, found", "must be a text, found"
_NAME_RULE = (
    "must be at most 256 letters, digits, dots, hyphens and underscores, and begin and end with a letter or digit"
)
_NO_NPU = "means an NPU, and this machine shows none (CANN and torch_npu installed?): set torch for its other devices"
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "backend_type": [
        *((name, f"{_NO_NPU}, found {name!r}") for name in ("atb", "ms")),
        (
            "vllm",
            "must be torch, or atb or ms on an NPU: vLLM is a backend of the router, --backend vllm://HOST:PORT, "
            "found 'vllm'",
        ),
        *(
            ("Torch", "must be torch, or atb or ms on an NPU, found 'Torch'"),
            (3, f"{_TEXT} 3"),
            (..., "is missing"),
            (None, "is missing"),
        ),
    ],
    "world_size": [
        *((bad, f"must be in [1, 1048576], found {bad!r}") for bad in (0, -1, 1_048_577, "0")),
        *((bad, f"{_NUMBER} {bad!r}") for bad in ("two", 1.5, "1.5", True, [1], "", "nan", float("inf"))),
        (..., "is missing"),
    ],
    "rank": [(-1, "must be at least 0, found -1"), ("x", f"{_NUMBER} 'x'"), (..., "is missing"), (None, "is missing")],
    "npu_device_id": [
        (-1, "must be at least 0, found -1"),
        (8, "must be less than the 8 visible devices, found 8"),
        (False, f"{_NUMBER} False"),
        (..., "is missing"),
    ],
    "local_rank": [
        (-1, "must be at least 0, found -1"),
        ("8", "must be less than the 8 visible devices, found 8"),
        ({}, f"{_NUMBER} {{}}"),
        (..., "is missing"),
    ],
    "num_threads": [(0, "must be at least 1, found 0"), ("many", f"{_NUMBER} 'many'")],
    "trust_remote_code": [(bad, f"{_TRUTH} {bad!r}") for bad in ("yes", 2, "", [])],
    "model_name": [
        *((bad, f"{_NAME_RULE}, found {bad!r}") for bad in ("-a", "a.", "_a", "a b", "", "a" * 257, "ä", "a/b")),
        (3, f"{_TEXT} 3"),
    ],
    "inference_mode": [("", "must not be empty, found ''"), (1, f"{_TEXT} 1")],
    "max_position_embeddings": [(0, "must be at least 1, found 0"), ("long", f"{_NUMBER} 'long'")],
    "load_tokenizer": [("no", f"{_TRUTH} 'no'"), (None.__class__, f"{_TRUTH} {type(None)!r}")],
    "tokenizer_path": [(" ", "must not be empty, found ' '"), (7, f"{_TEXT} 7")],
    "model_id": [("", "must not be empty, found ''"), ([], f"{_TEXT} []")],
    "block_size": [(0, "must be in [1, 1024], found 0"), ("x", f"{_NUMBER} 'x'")],
    "npu_mem": [(-2, "must be at least -1, found -2"), (0.5, f"{_NUMBER} 0.5")],
    "cpu_mem": [(-2, "must be at least -1, found -2"), ("all", f"{_NUMBER} 'all'")],
}


def test_every_row_is_tried() -> None:
    assert set(ACCEPTED) == set(REFUSED) == set(NAMES)


@pytest.mark.parametrize(("name", "given", "value"), [(n, g, v) for n, rows in ACCEPTED.items() for g, v in rows])
def test_an_accepted_value(name: str, given: Any, value: Any) -> None:
    got = getattr(read(num_devices=8, **{name: given}), name)
    assert (type(got), got) == (type(value), value)


@pytest.mark.parametrize(("name", "given", "text"), [(n, g, t) for n, rows in REFUSED.items() for g, t in rows])
def test_a_refused_value_is_named(name: str, given: Any, text: str) -> None:
    assert error_of(num_devices=8, **{name: given}) == f"model_config[{name!r}] {text}"


def test_a_rank_is_below_the_world_size() -> None:
    assert read(world_size=4, rank="3").rank == 3
    text = "model_config['rank'] must be less than world_size (4), found 4"
    assert error_of(world_size=4, rank=4) == text


def test_an_unknown_field_is_named() -> None:
    assert error_of(plugin_params=4).startswith(
        "model_config['plugin_params'] is not known; options of Penstock itself"
    )


@pytest.mark.parametrize(("listed", "count"), [(None, 1), ("0", 1), ("0,1,2,3", 4), ("", 0), (" 4 , 5 ", 2)])
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int) -> None:
    """All of them where the variable is unset: this release has the CPU."""
    environment = {} if listed is None else {"ASCEND_RT_VISIBLE_DEVICES": listed}
    monkeypatch.setattr(model_settings, "current_environment", lambda: environment)
    assert model_settings.visible_devices() == count
    if count:
        assert ModelSettings.read({**REQUIRED, "npu_device_id": count - 1}).npu_device_id == count - 1
    with pytest.raises(ModelConfigError, match=f"npu_device_id.*less than the {count} visible devices"):
        ModelSettings.read({**REQUIRED, "npu_device_id": count})


def test_the_meaning_of_the_fields_here() -> None:
    settings = read(model_id="m", model_name="n", max_position_embeddings="64", num_threads="3", load_tokenizer="false")
    assert settings.service_options() == {
        "model": "m",
        "served_model_name": "n",
        "max_context": 64,
        "mask_threads": 3,
        "load_tokenizer": False,
        # Callers that drive the model by hand have one block table a sequence.
        "kv_groups": False,
    }
    assert settings.warnings == ()
    loud = read(trust_remote_code=True, inference_mode="la", tokenizer_path="t")
    assert [text.split(" ", 1)[0] for text in loud.warnings] == ["trust_remote_code", "inference_mode"]
    assert loud.service_options()["tokenizer_path"] == "t"


def test_rank_0_starts_the_others() -> None:
    assert read(world_size=2).service_options()["tensor_parallel"] == 2
    assert "tensor_parallel" not in read(world_size=1).service_options()
    with pytest.raises(ModelConfigError, match=r"model_config\['rank'\] must be 0, found 1: rank 0 starts the others"):
        read(world_size=2, rank=1).service_options()


def test_a_launchers_process_has_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    monkeypatch.setattr(model_settings, "current_environment", lambda: variables)
    assert read(world_size=2, rank=1).service_options()["tensor_parallel"] == 2
    assert "tensor_parallel" not in read(world_size=1).service_options()
    with pytest.raises(ModelConfigError, match=r"model_config\['rank'\] must be 1, as the variable RANK, found 0"):
        read(world_size=2).service_options()


def test_the_file_of_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags go before the file, and what is no dictionary is told with its path."""
    monkeypatch.setattr(model_settings, "current_environment", dict)
    path = tmp_path / "model_config.json"
    path.write_text(json.dumps({**REQUIRED, "model_name": "from-file", "max_position_embeddings": "32"}))
    given = {"model_config": str(path), "served_model_name": "from-flag", "kv_memory": None}
    made = with_model_config(given)
    assert made["served_model_name"] == "from-flag"
    assert (made["max_context"], made["mask_threads"], made["model_config"]) == (32, 8, str(path))
    monkeypatch.setattr(model_settings, "current_environment", lambda: {"PENSTOCK_MODEL_CONFIG": str(path)})
    assert with_model_config({})["served_model_name"] == "from-file"
    for text, problem in (
        ("[]", "holds no JSON object"),
        ("{", "cannot be read as JSON"),
        (json.dumps({**REQUIRED, "rank": 5}), r"model_config\['rank'\] must be less than world_size"),
        (json.dumps({**REQUIRED, "world_size": 2, "rank": 1}), r"model_config\['rank'\] must be 0"),
    ):
        path.write_text(text)
        with pytest.raises(StartupError, match=problem) as caught:
            with_model_config({"model_config": str(path)})
        assert caught.value.flag == "--model-config"
        assert str(path) in caught.value.message
    with pytest.raises(StartupError, match="cannot be read"):
        with_model_config({"model_config": str(tmp_path / "none.json")})


@pytest.mark.parametrize("name", ["atb", "ms"])
def test_their_own_backends_mean_the_npu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(model_settings, "num_npus", lambda: 2)
    settings = read(backend_type=name, npu_device_id=1, num_devices=2)
    assert settings.device("auto") == "npu:1"
    assert settings.device("npu") == "npu:1"


def test_sizes_of_the_pools_are_those_of_their_configuration() -> None:
    made = read(block_size=128, npu_mem=-1, cpu_mem=2).service_options()
    assert (made["block_size"], made["kv_memory"], made["host_kv_memory"]) == (128, "-1", "2GiB")
    assert read(npu_mem="3", cpu_mem=0).service_options()["host_kv_memory"] == "0"
    assert not {"block_size", "kv_memory", "host_kv_memory"} & read().service_options().keys()
