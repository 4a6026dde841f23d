"""The compose files: variables that the services know, ports that agree, time to drain."""

from __future__ import annotations

import re
from typing import Any

import pytest
from factories.source_tree import ROOT
from factories.yaml_files import read_yaml
from penstock.cli.serve.service_process import ROLES
from penstock.common.options import options_of

# Of the image, not of a service.
OF_THE_IMAGE = {"ROLE"}


def services_of(name: str) -> dict[str, Any]:
    """Return the services of a compose file by their names."""
    found: dict[str, Any] = read_yaml(ROOT / name)["services"]
    return found


STACK = services_of("docker-compose.yml")


def test_every_service_of_penstock_is_in_the_stack() -> None:
    assert set(ROLES) <= set(STACK)
    for name in ROLES:
        assert STACK[name]["build"]["args"]["ROLE"] == name


@pytest.mark.parametrize("name", ROLES)
def test_a_container_has_limits_that_a_variable_sets(name: str) -> None:
    service, guide = STACK[name], (ROOT / "docs" / "guide" / "deployment.md").read_text(encoding="utf-8")
    assert service["pids_limit"] > 0
    memory = re.fullmatch(rf"\$\{{PENSTOCK_{name.upper()}_MEMORY:-(\w+)\}}", service["mem_limit"])
    assert memory is not None
    assert memory[1] in guide
    assert service["cpus"] == f"${{PENSTOCK_{name.upper()}_CPUS:-0}}"


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.tls.yml"])
@pytest.mark.parametrize("name", ROLES)
def test_variables_are_options_of_the_service(name: str, file: str) -> None:
    known = {bound.flag.lstrip("-").upper().replace("-", "_") for bound in options_of(ROLES[name].config_class())}
    given = {key.removeprefix("PENSTOCK_") for key in services_of(file)[name]["environment"]}
    assert given - OF_THE_IMAGE <= known


@pytest.mark.parametrize("name", ROLES)
def test_a_service_has_time_to_drain(name: str) -> None:
    grace = STACK[name]["stop_grace_period"]
    assert grace.endswith("s")
    assert int(grace[:-1]) >= ROLES[name].config_class()().drain_grace_seconds + 10


def test_variables_of_the_image_are_options_of_every_service() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    given = set(re.findall(r"^ +PENSTOCK_(\w+)=", text, re.MULTILINE))
    assert {"HEALTH_SOCKET", "HOST"} < given
    for role in ROLES.values():
        known = {bound.flag.lstrip("-").upper().replace("-", "_") for bound in options_of(role.config_class())}
        assert given - OF_THE_IMAGE <= known


@pytest.mark.parametrize("file", ["prometheus.yml", "prometheus.tls.yml"])
def test_prometheus_asks_every_service_at_its_port(file: str) -> None:
    config = read_yaml(ROOT / "deploy" / "prometheus" / file)
    asked = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in config["scrape_configs"]}
    ports = {}
    for name in ROLES:
        given = STACK[name]["environment"]
        ports[f"penstock-{name}"] = int(given.get("PENSTOCK_METRICS_PORT", given["PENSTOCK_PORT"]))
    assert asked == ports
