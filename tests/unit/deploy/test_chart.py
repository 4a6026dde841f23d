"""The Helm chart, rendered by helm itself and held against Kubernetes' schemas, the services' flags and metrics.

What needs a tool skips where it is absent: `python tools/get_helm.py` brings helm. No cluster is asked.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml
from factories.source_tree import ROOT
from penstock.cli.serve.service_process import ROLES
from penstock.common.config import ServerConfig, from_env_and_flags
from penstock.common.options import options_of

CHART = ROOT / "deploy" / "helm" / "penstock"
HELM = shutil.which(os.environ.get("HELM", "helm"))
KUBECTL = shutil.which("kubectl")
KUBERNETES = "1.33"
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: python tools/get_helm.py")

Document = dict[str, Any]
SETTINGS = {
    "production": ["-f", str(CHART / "values-production.yaml")],
    "gpu": ["-f", str(CHART / "values-gpu.yaml")],
    "npu": ["-f", str(CHART / "values-npu.yaml")],
    "hub": ["--set", "model.source=hub,model.name=Qwen/Qwen3-0.6B,model.hub.tokenSecret=hub,model.hub.cacheLimit=9Gi"],
    "claim": ["--set", "model.source=pvc,model.name=qwen,model.pvc.claimName=models"],
    "image": ["--set", "model.source=image,model.image.reference=registry.example.org/qwen:1"],
    "small": ["--set", "gateway.enabled=false,networkPolicy.enabled=false,disruptionBudget.enabled=false"],
    "clients": ["--set", "networkPolicy.clients[0].podSelector.matchLabels.app=shop,serviceAccount.create=false"],
}
MODELS = ("hub", "claim", "image")
# Every set of values files that says where the model is at most once, and takes one accelerator at most.
COMBINATIONS = [
    names
    for count in range(len(SETTINGS) + 1)
    for names in itertools.combinations(SETTINGS, count)
    if sum(name in MODELS for name in names) <= 1 and not {"gpu", "npu"} <= set(names)
]
QUICK = [(), ("production", "gpu", "hub", "clients"), ("npu", "claim", "small")]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, "template", "demo", str(CHART), *arguments], capture_output=True, text=True)


@functools.cache
def rendered(names: tuple[str, ...]) -> tuple[Document, ...]:
    done = helm(*(argument for name in names for argument in SETTINGS[name]))
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(documents: tuple[Document, ...], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: tuple[Document, ...]) -> dict[str, Document]:
    """{name of the service: its pods' template}"""
    templates = [document["spec"]["template"] for document in of_kind(documents, "Deployment")]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def container(template: Document) -> Document:
    [only] = template["spec"]["containers"]
    return only


def matches(selector: dict[str, str], template: Document) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


def check_schemas(documents: tuple[Document, ...]) -> None:
    for document in documents:
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_references(documents: tuple[Document, ...]) -> None:
    """Selectors find the pods of one service, services their ports, mounts their volumes."""
    templates = pods(documents)
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels", selector)
        if labels:
            found = [name for name, template in templates.items() if matches(labels, template)]
            assert found == [document["metadata"]["labels"]["app.kubernetes.io/component"]]
    for service in of_kind(documents, "Service"):
        [template] = [pod for pod in templates.values() if matches(service["spec"]["selector"], pod)]
        ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    for policy in of_kind(documents, "NetworkPolicy"):
        ports = {port["name"] for pod in templates.values() for port in container(pod)["ports"]}
        rules = [*policy["spec"]["ingress"], *policy["spec"]["egress"]]
        assert {port["port"] for rule in rules for port in rule["ports"] if isinstance(port["port"], str)} <= ports
        peers = [peer for rule in policy["spec"]["egress"] for peer in rule.get("to", ())]
        assert all(
            any(matches(peer["podSelector"]["matchLabels"], pod) for pod in templates.values()) for peer in peers
        )
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [item for item in of_kind(documents, "Service") if wanted <= item["metadata"]["labels"].items()]
        names = [port["name"] for service in chosen for port in service["spec"]["ports"]]
        assert [names.count(endpoint["port"]) for endpoint in monitor["spec"]["endpoints"]] == [1]
    for template in templates.values():
        mounts = {mount["name"] for mount in container(template)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
    accounts = {item["metadata"]["name"] for item in of_kind(documents, "ServiceAccount")} or {"default"}
    assert {template["spec"]["serviceAccountName"] for template in templates.values()} <= accounts


def check_addresses(documents: tuple[Document, ...]) -> None:
    """Router and gateway call a service each at a port of it."""
    ports = {
        f"{service['metadata']['name']}:{port['port']}"
        for service in of_kind(documents, "Service")
        for port in service["spec"]["ports"]
    }
    flags = ("--tokenizer=", "--backend=", "--router=")
    called = [
        argument.split("=", 1)[1]
        for template in pods(documents).values()
        for argument in container(template)["args"]
        if argument.startswith(flags)
    ]
    assert len(called) == (3 if "gateway" in pods(documents) else 2)
    assert set(called) <= ports


def check_flags(documents: tuple[Document, ...]) -> None:
    """Each service takes its command line: the flags are its own, and their values together make a configuration."""
    for name, template in pods(documents).items():
        if name in ROLES:
            arguments = container(template)["args"]
            fields = {bound.flag: bound.name for bound in options_of(ROLES[name].config_class())}
            pairs = [argument.partition("=")[::2] for argument in arguments if argument.startswith("--")]
            assert [flag for flag, _ in pairs if flag not in fields] == []
            config = from_env_and_flags(
                ROLES[name].config_class(), {fields[flag]: text or True for flag, text in pairs}
            )
            assert config.host == "0.0.0.0"
            positional = [argument for argument in arguments if not argument.startswith("--")]
            assert len(positional) <= (name in ("tokenizer", "generation"))


def check_pods(documents: tuple[Document, ...]) -> None:
    """Pods end after their drain, run without rights, and have every probe."""
    for template in pods(documents).values():
        spec, only = template["spec"], container(template)
        [grace] = [float(text.split("=")[1]) for text in only["args"] if text.startswith("--drain-grace-seconds=")]
        sleep = float(only["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= grace + sleep + 5
        assert only["securityContext"]["readOnlyRootFilesystem"] is True
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= only.keys()
        assert {mount["mountPath"] for mount in only["volumeMounts"]} >= {"/tmp", "/home/penstock"}


def metric_names() -> set[str]:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+)` \| (?:gauge|counter) \|", page, re.MULTILINE))


@needs_helm
@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=[] if names in QUICK else [pytest.mark.slow]) for names in COMBINATIONS],
    ids=lambda names: "+".join(names) or "defaults",
)
def test_what_values_give_is_valid_and_fits_together(names: tuple[str, ...]) -> None:
    documents = rendered(names)
    check_references(documents)
    check_addresses(documents)
    check_flags(documents)
    check_pods(documents)
    check_schemas(documents)


def test_autoscalers_name_metrics_that_exist() -> None:
    """Of the gateway too, once it is one of the services."""
    template = (CHART / "templates" / "autoscalers.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r'"(penstock_\w+)"', template))
    assert len(used) == 4
    assert {name for name in used if "gateway" in ROLES or "gateway" not in name} <= metric_names()


def test_the_drain_is_that_of_the_services() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["drain"]["graceSeconds"] == ServerConfig().drain_grace_seconds


def test_what_is_made_from_the_values_is_up_to_date() -> None:
    """Schema, README, and with helm the kustomize base."""
    done = subprocess.run([sys.executable, ROOT / "tools/chart_values.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("router.replica=3", "replica"),
        ("router.replicas=0", "replicas"),
        ("model.source=disk", "source"),
        ("model.source=hub", "model.name"),
        ("model.source=pvc", "model.pvc.claimName"),
        ("tls.enabled=true", "tls.secretName"),
        ("tls.enabled=true,tls.secretName=a,probes.kind=grpc", "probes.kind"),
        ("router.autoscaling.enabled=true,router.autoscaling.minReplicas=9", "router.autoscaling.minReplicas"),
        ("generation.options.KV_MEMORY=1", "KV_MEMORY"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, named: str) -> None:
    done = helm("--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


@needs_helm
def test_options_become_flags_as_they_are_written() -> None:
    done = helm("--set", "generation.options.max-context=2000000,generation.options.load-tokenizer=false")
    documents = tuple(document for document in yaml.safe_load_all(done.stdout) if document)
    arguments = container(pods(documents)["generation"])["args"]
    assert {"--kv-memory=1GiB", "--max-context=2000000", "--no-load-tokenizer"} <= set(arguments)


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl")
@pytest.mark.parametrize("folder", ["base", "overlays/claim"])
def test_kustomize_gives_what_is_valid_and_fits_together(folder: str) -> None:
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(ROOT / "deploy" / "kustomize" / folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = tuple(yaml.safe_load_all(done.stdout))
    assert set(pods(documents)) >= {"tokenizer", "generation", "router"}
    check_references(documents)
    check_addresses(documents)
    check_flags(documents)
    check_schemas(documents)
