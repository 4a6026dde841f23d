"""Place and name of a model."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.common.checkpoint import DEMO_MODEL_NAME, check_model, demo_folder, model_name, resolve_model, source_name
from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint


def test_no_model_is_the_embedded_one() -> None:
    assert resolve_model(None) == demo_folder()
    assert model_name(None) == DEMO_MODEL_NAME


def test_a_folder_is_itself_and_named_after_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == folder
    assert model_name(str(folder)) == "my-model"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models--Qwen--Qwen2.5-0.5B/snapshots/06a4a8", "Qwen/Qwen2.5-0.5B@06a4a8"),
        ("models--gpt2/snapshots/06a4a8", "gpt2@06a4a8"),
        ("snapshots/my-model", "my-model"),
        ("my-model", "my-model"),
    ],
)
def test_a_snapshot_of_the_hub_is_known_by_its_model_and_revision(tmp_path: Path, folder: str, name: str) -> None:
    assert source_name(tmp_path / folder) == name


def test_a_hub_id_keeps_its_name_without_the_revision() -> None:
    assert model_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert model_name("Qwen/Qwen2.5-0.5B-Instruct@main") == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "a/b/c", "~nobody/x", "nothing/"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(StartupError, match="no such folder") as caught:
        resolve_model(model)
    assert caught.value.flag == "MODEL"
    assert model in caught.value.message
    # The absolute path is in the text only when MODEL is not absolute itself.
    assert caught.value.message.count("/no/such/folder") == (model == "/no/such/folder")


def test_a_name_is_not_looked_up_when_the_hub_is_off() -> None:
    with pytest.raises(StartupError, match="the hub is off"):
        resolve_model("owner/name", allow_hub=False)


def test_a_start_looks_for_the_folder_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check_model(None)
    check_model("owner/name")
    with pytest.raises(StartupError, match="no such folder"):
        check_model("/no/such/folder")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE forbids requests to the hub"):
        check_model("owner/name")
    (tmp_path / "models--owner--name").mkdir()
    check_model("owner/name")


def test_a_hub_out_of_reach_is_told_with_the_flag_and_the_variables(tmp_path: Path) -> None:
    # A process of its own, since huggingface_hub reads its variables as it is imported. Port 9 of loopback is closed.
    code = "from penstock.common.checkpoint import resolve_model; resolve_model('owner/name@main')"
    found = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | found, capture_output=True, text=True, timeout=60, check=False
    )
    told = next(line for line in run.stderr.splitlines() if "StartupError:" in line)
    assert "the hub cannot be reached" in told
    assert all(name in told for name in ("MODEL owner/name@main", "--model", "HF_HOME", "HF_HUB_OFFLINE"))
    assert "EntryNotFound" not in told


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartupError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_the_fingerprint_is_the_sha256_of_tokenizer_json(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert tokenizer_fingerprint(tmp_path) == hashlib.sha256(b"{}").hexdigest()
