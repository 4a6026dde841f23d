"""Environments of other engines: made once a version, and vLLM finds its own name."""

from __future__ import annotations

import subprocess
from importlib.metadata import PathDistribution, version
from pathlib import Path
from typing import Any

import pytest

from tools import real_engines


def packages_of(home: Path) -> Path:
    packages = home / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    return packages


def test_vllm_finds_its_version_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = packages_of(tmp_path)
    real_engines.name_distribution(tmp_path)
    monkeypatch.syspath_prepend(str(packages))
    assert version("vllm") == f"{real_engines.VLLM}+cpu"


def test_a_name_that_is_there_is_left_alone(tmp_path: Path) -> None:
    facts = packages_of(tmp_path) / "vllm-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: vllm\nVersion: 1.0\n")
    real_engines.name_distribution(tmp_path)
    assert [one.name for one in facts.parent.iterdir()] == [facts.name]
    assert PathDistribution(facts).version == "1.0"


def test_an_environment_is_made_once_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(real_engines.venv, "create", lambda home, **_: Path(home).mkdir(parents=True, exist_ok=True))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(real_engines.subprocess, "run", run)
    program = real_engines.installed(tmp_path, "smg")
    assert program == real_engines.installed(tmp_path, "smg") == tmp_path / "smg-engine-venv" / "bin" / "smg"
    assert len(calls) == 1
    monkeypatch.setitem(real_engines.PACKAGES, "smg", ("smg==2.0",))
    real_engines.installed(tmp_path, "smg")
    assert calls[1][-1] == "smg==2.0"
