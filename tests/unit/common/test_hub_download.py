"""Models that come from a hub: bytes that are told, a cache that is whole, and a hub that lacks the model.

Each in a process of its own, since huggingface_hub reads its variables as it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from factories.servers.hub import HUB_CHUNK, SHA, Hub, running_hub

RESOLVE = """
import json, sys
from dataclasses import asdict
from penstock.common.checkpoint import resolve_model
from penstock.common.environment import prepare_environment
prepare_environment()
told = []
folder = resolve_model(sys.argv[1], show=lambda progress: told.append(asdict(progress)))
print(json.dumps({"folder": str(folder), "told": told}))
"""
FILES = {"config.json": b"{}", "model.safetensors": bytes(2 * HUB_CHUNK + 5), "weights.bin": bytes(100)}
WANTED = 2 * HUB_CHUNK + 7


def run(hub: Hub, model: str = "", code: str = RESOLVE, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, model or hub.repo],
        env={**os.environ, **hub.environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def resolved(hub: Hub, **variables: str) -> tuple[Path, list[dict[str, Any]]]:
    done = run(hub, **variables)
    # No bar of a library.
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    return Path(found["folder"]), found["told"]


def test_the_bytes_of_missing_files_are_told_and_a_whole_cache_tells_nothing(tmp_path: Path) -> None:
    with running_hub(FILES, tmp_path) as hub:
        folder, told = resolved(hub)
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == {
            "config.json": 2,
            "model.safetensors": 2 * HUB_CHUNK + 5,
        }
        assert {(one["stage"], one["subject"], one["total"]) for one in told} == {("download", hub.repo, WANTED)}
        done = [one["done"] for one in told]
        assert (done, done[0], done[-1]) == (sorted(done), 0, WANTED)
        # Piece by piece.
        assert len(set(done)) >= 4
        assert [one["ended"] for one in told] == [*[False] * (len(told) - 1), True]

        assert resolved(hub) == (folder, [])
        assert resolved(hub, HF_HUB_OFFLINE="1") == (folder, [])
        assert sorted(hub.sent) == ["config.json", "model.safetensors"]

        (folder / "config.json").unlink()
        _, told = resolved(hub)
        assert {one["total"] for one in told} == {2}


def test_a_cache_serves_where_the_hub_is_gone(tmp_path: Path) -> None:
    with running_hub(FILES, tmp_path) as hub:
        folder, _ = resolved(hub)
    assert resolved(hub) == (folder, [])


@pytest.mark.parametrize(
    ("model", "told"), [("owner/other", "the hub has no such model"), ("owner/tiny@v9", "but not the revision v9")]
)
def test_what_the_hub_lacks_is_told(model: str, told: str, tmp_path: Path) -> None:
    with running_hub(FILES, tmp_path) as hub:
        assert told in run(hub, model).stderr
        assert hub.sent == []


def test_a_commit_can_be_named(tmp_path: Path) -> None:
    with running_hub(FILES, tmp_path) as hub:
        done = run(hub, f"{hub.repo}@{SHA}")
        assert json.loads(done.stdout)["folder"].endswith(SHA)


def test_who_shows_may_give_up(tmp_path: Path) -> None:
    code = """
import sys
from penstock.common.checkpoint import resolve_model
class Enough(Exception): pass
def show(progress):
    if progress.done: raise Enough
resolve_model(sys.argv[1], show=show)
"""
    with running_hub(FILES, tmp_path, held="model.safetensors") as hub:
        # The rest never comes.
        hub.allow(HUB_CHUNK + 1)
        done = run(hub, code=code)
        assert done.returncode == 1
        assert "Enough" in done.stderr
