"""KServe's runtimes and the services that use them: published types, flags of `penstock serve`, ports that fit."""

from __future__ import annotations

from typing import Any

import pytest
from factories.custom_resources import check_resource
from factories.source_tree import ROOT
from factories.yaml_files import yaml_documents
from penstock.cli.serve.tree import tree_options

FOLDER = ROOT / "deploy" / "kserve"


def documents(name: str) -> tuple[dict[str, Any], ...]:
    return yaml_documents((FOLDER / name).read_text(encoding="utf-8"))


RUNTIMES = {one["metadata"]["name"]: one["spec"] for one in documents("runtimes.yaml")}


def values_of(arguments: list[str]) -> dict[str, Any]:
    """Values of the flags by their names. Raises ValueError for a value that an option does not take."""
    options = {bound.flag: bound for bound in tree_options()}
    values: dict[str, Any] = {}
    for flag, _, text in (argument.partition("=") for argument in arguments if argument.startswith("--")):
        values[flag] = options[flag].parse(text) if text else True
        options[flag].check(values[flag])
    return values


@pytest.mark.parametrize("name", ["runtimes.yaml", "inference-service.yaml"])
def test_resources_have_the_published_types(name: str) -> None:
    for document in documents(name):
        check_resource(document)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_serves_the_mounted_model_at_the_port_that_kserve_calls(name: str) -> None:
    spec = RUNTIMES[name]
    [container] = spec["containers"]
    # KServe's names for the container, and for the folder that it downloads to.
    assert (container["name"], container["args"][0]) == ("kserve-container", "/mnt/models")
    assert container["command"] == ["penstock", "serve"]
    assert "--served-model-name={{.Name}}" in container["args"]
    values = values_of([argument for argument in container["args"] if "{{" not in argument])
    assert (values["--host"], values["--insecure-bind"]) == ("0.0.0.0", True)
    [port] = container["ports"]
    wanted = {"http1": "--http-port", "h2c": "--port"}[port["name"]]
    assert values[wanted] == port["containerPort"]
    for probe in ("startupProbe", "readinessProbe"):
        [asked] = [container[probe][kind] for kind in ("httpGet", "grpc") if kind in container[probe]]
        assert asked["port"] == port["containerPort"]
    metrics = int(spec["annotations"]["prometheus.kserve.io/port"])
    assert metrics == (values["--http-port"] if port["name"] == "http1" else values["--metrics-port"])


def test_services_name_a_runtime_that_speaks_their_protocol() -> None:
    services = documents("inference-service.yaml")
    models = [service["spec"]["predictor"]["model"] for service in services]
    assert sorted(model["runtime"] for model in models) == sorted(RUNTIMES)
    for model in models:
        spec = RUNTIMES[model["runtime"]]
        assert model["modelFormat"]["name"] in {one["name"] for one in spec["supportedModelFormats"]}
        # None means any.
        protocols = spec.get("protocolVersions")
        assert protocols is None or model["protocolVersion"] in protocols
