"""The systemd units: systemd's own check of each, variables and times that the services know."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from factories.source_tree import ROOT
from penstock.cli.serve.service_process import ROLES
from penstock.common.config import ServerConfig
from penstock.common.options import options_of

UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("tokenizer", "generation", "router", "gateway")
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path) -> None:
    """But that the program is not there: here another one is."""
    assert ANALYZE is not None
    program = tmp_path / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = []
    for name in SERVICES:
        unit = tmp_path / f"penstock-{name}@main.service"
        text = (UNITS / f"penstock-{name}@.service").read_text(encoding="utf-8")
        unit.write_text(text.replace("/opt/penstock/bin/penstock", str(program)), encoding="utf-8")
        units.append(str(unit))
    done = subprocess.run([ANALYZE, "verify", "--man=no", *units], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "penstock" in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_runs_its_service_and_waits_for_the_drain(name: str) -> None:
    text = (UNITS / f"penstock-{name}@.service").read_text(encoding="utf-8")
    assert f"ExecStart=/opt/penstock/bin/penstock serve {name}\n" in text
    assert f"EnvironmentFile=/etc/penstock/{name}-%i.env\n" in text
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) >= ServerConfig().drain_grace_seconds + 10


@pytest.mark.parametrize("name", [name for name in SERVICES if name in ROLES])
def test_variables_of_the_examples_are_options_of_the_service(name: str) -> None:
    known = {bound.flag.lstrip("-").upper().replace("-", "_") for bound in options_of(ROLES[name].config_class())}
    text = (UNITS / f"{name}-main.env").read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:# )?PENSTOCK_(\w+)=", text, re.MULTILINE)) <= known
