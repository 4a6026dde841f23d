"""`penstock download`: ranges after a broken connection, checksums, the cache alone; from either kind of hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories.servers.hub import HUB_CHUNK, Hub, running_hub
from penstock.cli.download import run_download
from penstock.common.checkpoint import HUB_FILES
from penstock.common.errors import StartupError
from penstock.common.hub_download import serving_files
from penstock.common.modelscope import CHECKSUMS

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: bytes(range(256)) * (44 << 10),
    SHARDS[1]: b"\x07" * 5000,
    "README.md": b"# Words",
    "pytorch_model.bin": b"pickles",
}
NEEDED = {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "scope"))
    with running_hub(dict(FILES), tmp_path, repo="owner/tiny-1.5") as hub:
        yield hub


def download(hub: Hub, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since huggingface_hub reads its variables as it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "download", hub.repo, *flags],
        env={**os.environ, **hub.environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_broken_connection_a_copy_and_the_cache_alone(hub: Hub, tmp_path: Path) -> None:
    hub.breaks[SHARDS[0]] = HUB_CHUNK + 100
    done = download(hub, "--output", str(tmp_path / "copy"))
    assert (done.returncode, "Error while" in done.stderr) == (0, False), done.stderr
    assert f"{tmp_path / 'copy'}: 5 files" in done.stdout
    assert "verified" in done.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        name: data for name, data in FILES.items() if name in NEEDED
    }
    # After the break came what huggingface_hub had not written yet, and nothing of the rest again.
    assert [start for name, start in zip(hub.sent, hub.starts, strict=True) if name == SHARDS[0]] == [0, HUB_CHUNK]
    sent = len(hub.sent)
    again = download(hub, "--offline")
    assert (again.returncode, len(hub.sent)) == (0, sent), again.stderr
    # A byte of the cache changes, as on a bad disk.
    blob = next(path for path in hub.cache.rglob(SHARDS[1]) if path.is_symlink()).resolve()
    blob.write_bytes(b"\x08" + b"\x07" * 4999)
    broken = download(hub, "--offline")
    assert broken.returncode == 2
    assert f"the checksum of {SHARDS[1]} is wrong: run without --offline" in broken.stderr
    mended = download(hub)
    assert mended.returncode == 0, mended.stderr
    assert hub.sent[sent:] == [SHARDS[1]]


def test_a_wrong_checksum_comes_once_more_and_then_is_refused(hub: Hub) -> None:
    hub.changes[SHARDS[1]] = 1
    done = download(hub)
    assert done.returncode == 0, done.stderr
    assert f"{SHARDS[1]}: the checksum is not the hub's; downloading again" in done.stderr
    assert hub.sent.count(SHARDS[1]) == 2
    hub.changes[SHARDS[0]] = 10
    refused = download(hub, HF_HUB_CACHE=str(hub.cache / "other"))
    assert refused.returncode == 2
    assert f"the checksum of {SHARDS[0]} is wrong" in refused.stderr
    # Nobody serves it.
    assert not [path for path in (hub.cache / "other").rglob(SHARDS[0]) if path.exists()]


def test_what_is_not_there_names_model(hub: Hub) -> None:
    nowhere = download(hub, "--offline", HF_HUB_CACHE=str(hub.cache / "empty"))
    assert nowhere.returncode == 2
    assert "the hub's cache does not have it" in nowhere.stderr
    assert "not the revision v9" in download(hub, "--revision", "v9").stderr


def fetch(hub: Hub, *, model: str = "", **given: str) -> None:
    run_download(model or hub.repo, {"source": "modelscope", "hub_url": f"http://{hub.address}/", **given})


def test_modelscope_goes_on_after_breaks_and_verifies(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.breaks[SHARDS[0]] = 5 << 20
    fetch(hub)
    folder = tmp_path / "scope" / "models" / "owner" / "tiny-1___5"
    assert {path.name for path in folder.iterdir()} == {*NEEDED, CHECKSUMS}
    assert (folder / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    assert [start >> 20 for name, start in zip(hub.sent, hub.starts, strict=True) if name == SHARDS[0]] == [0, 5, 10]
    assert f"serve it with: penstock serve {folder}" in capsys.readouterr().out
    sent = len(hub.sent)
    fetch(hub)
    fetch(hub, offline="true")
    assert len(hub.sent) == sent
    (folder / SHARDS[1]).write_bytes(b"\x09" * 5000)
    with pytest.raises(StartupError, match=r"checksum of .* is wrong: run without --offline"):
        fetch(hub, offline="true")
    fetch(hub)
    assert hub.sent[sent:] == [SHARDS[1]]
    hub.changes[SHARDS[1]] = 10
    (folder / SHARDS[1]).unlink()
    with pytest.raises(StartupError, match="bytes that do not match its checksum"):
        fetch(hub)
    assert not (folder / SHARDS[1]).exists()


def test_modelscope_names_what_is_wrong(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such model"):
        fetch(hub, model="owner/other")
    with pytest.raises(StartupError, match="expected owner/name"):
        fetch(hub, model="../../etc/x")
    with pytest.raises(StartupError, match="not in ModelScope's cache"):
        fetch(hub, offline="true")
    with pytest.raises(StartupError, match="cannot be reached"):
        run_download(hub.repo, {"source": "modelscope", "hub_url": "http://127.0.0.1:1"})
    with pytest.raises(StartupError, match="is a local folder"):
        run_download(str(tmp_path), {})
    with pytest.raises(StartupError, match="differ"):
        run_download("owner/x@v1", {"revision": "v2"})
    hub.files["../evil.json"] = b"{}"
    with pytest.raises(StartupError, match="does not answer like ModelScope"):
        fetch(hub)


def test_only_what_serving_reads_is_chosen() -> None:
    names = [*FILES, "original/params.json", "onnx/model.safetensors", "consolidated.safetensors"]
    names += ["additional_chat_templates/rag.jinja", "chat_template.jinja", "merges.txt"]
    more = {"additional_chat_templates/rag.jinja", "chat_template.jinja", "merges.txt"}
    assert set(serving_files(names, HUB_FILES)) == NEEDED | more
    assert serving_files(["consolidated.safetensors"], HUB_FILES) == ["consolidated.safetensors"]
