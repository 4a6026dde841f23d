"""Devices and driver of a host with an NPU are the same wherever they are written. No other image has torch-npu."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from factories.source_tree import ROOT
from factories.yaml_files import read_yaml
from penstock.cli.serve.service_process import ROLES
from penstock.common.options import options_of

COMPOSE: dict[str, Any] = read_yaml(ROOT / "docker-compose.npu.yml")["services"]
GUIDE = (ROOT / "docs" / "guide" / "ascend.md").read_text(encoding="utf-8")
DOCKER = ROOT / "deploy" / "docker"


def test_paths_of_the_driver_are_those_of_the_page() -> None:
    mounts = [mount.split(":") for mount in COMPOSE["generation"]["volumes"]]
    # At the same paths, to read only.
    assert all(there == here and mode == "ro" for there, here, mode in mounts)
    paths = [there for there, _, _ in mounts]
    chart = read_yaml(ROOT / "deploy" / "helm" / "penstock" / "values-npu.yaml")
    assert chart["generation"]["hostPaths"] == [{"path": path} for path in paths]
    devices = [device.replace("${PENSTOCK_NPU:-0}", "0") for device in COMPOSE["generation"]["devices"]]
    assert len(devices) == 4
    for path in (*paths, *devices):
        assert f"`{path}`" in GUIDE, path


def test_variables_are_options_of_the_service() -> None:
    assert list(COMPOSE) == ["generation"]
    known = {
        "PENSTOCK_" + bound.flag.lstrip("-").upper().replace("-", "_")
        for bound in options_of(ROLES["generation"].config_class())
    }
    text = (DOCKER / "Dockerfile.npu").read_text(encoding="utf-8")
    given = set(re.findall(r"^ +(PENSTOCK_\w+)=", text, re.MULTILINE))
    assert {"PENSTOCK_HEALTH_SOCKET", "PENSTOCK_HOST"} < given
    assert given | set(COMPOSE["generation"]["environment"]) <= known


def test_only_the_npus_image_has_torch_npu() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [name for name, packages in extras.items() if any("torch-npu" in one for one in packages)] == ["npu"]
    assert not any("npu" in package for name, packages in extras.items() if name != "npu" for package in packages)
    assert ".[generation,npu${EXTRAS" in (DOCKER / "Dockerfile.npu").read_text(encoding="utf-8")
    assert "npu" not in (DOCKER / "Dockerfile").read_text(encoding="utf-8")
