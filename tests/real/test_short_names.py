"""`penstock demo --model smollm2`: the file of an installed package, found by its short name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.common.named_models import NAMED_MODELS

from benchmarks.checkpoints import CACHE

# The tests have a cache of their own (conftest.py); the models are in the user's.
FILE = Path(os.environ.get("PENSTOCK_REAL_MODELS") or CACHE) / "real" / "smollm2-135m.gguf"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.is_file(), reason="the model is not in the cache: `make real` fetches it"),
]


def test_the_demo_runs_on_the_file_of_an_installed_package(tmp_path: Path) -> None:
    model = NAMED_MODELS["smollm2"]
    # As pip lays it out, with a link in place of the file.
    told = tmp_path / f"{model.package.replace('-', '_')}-{model.version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {model.package}\nVersion: {model.version}\n")
    file = tmp_path / model.file
    file.parent.mkdir()
    file.symlink_to(FILE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "demo", "--model", "smollm2"],
        capture_output=True,
        text=True,
        timeout=590,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "on smollm2" in done.stdout
    assert "Rayleigh scattering" in done.stdout
    assert "Where the time went" in done.stdout
