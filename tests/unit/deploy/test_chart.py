"""The Helm chart, rendered by helm itself and held against Kubernetes' schemas, the services' flags and metrics.

What needs a tool skips where it is absent: `python tools/get_helm.py` brings helm. No cluster is asked.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from factories.custom_resources import KUBERNETES, SPECS, check_pod, check_resource
from factories.source_tree import ROOT
from factories.yaml_files import read_yaml, yaml_documents
from penstock.cli.serve.service_process import ROLES
from penstock.common.config import ServerConfig, from_env_and_flags
from penstock.common.options import options_of
from penstock.engines import vllm_engine_pb2
from penstock.gateway.app import _POST as POSTED
from penstock.router.backend_targets import scheme_of, service_of

from tools import chart_values
from tools.get_helm import find_helm

CHART = ROOT / "deploy" / "helm" / "penstock"
HELM = find_helm()
KUBECTL = shutil.which("kubectl")
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
    "vllm": ["--set", "vllm.enabled=true,vllm.image=registry.example.org/vllm:1,model.servedName=qwen"],
    "endpoints": ["--set", "router.discovery=endpoints"],
    "jobs": ["--set", "gateway.jobsPort=50054,networkPolicy.databasePorts[0].port=5432"],
    "adapters": [
        *("--set", r"generation.adapters.stores=hub://my-team\,s3://bucket/prefix,generation.adapters.disk=4GiB"),
        *("--set", "generation.adapters.claimName=adapters"),
    ],
    "pool": [
        *("--set", "inferencePool.enabled=true,inferencePool.parentGateway=inference"),
        *("--set", "inferencePool.hostnames[0].name=llm.example.org"),
    ],
    "fleet": [
        *("--set", "generationPool.enabled=true,generationPool.parentGateway=inference"),
        *("--set", "generationPool.clients[0].namespaceSelector.matchLabels.app=gateways"),
    ],
    "clients": [
        *("--set", "networkPolicy.clients[0].podSelector.matchLabels.app=shop,serviceAccount.create=false"),
        *("--set", "auth.keysSecret=keys"),
    ],
}
MODELS = ("hub", "claim", "image")
# Settings that exclude each other: one place of the model, one accelerator, TLS that others' pods do not speak, a pool
# of gateways or a port of one where there is none, rights for an account that is not named.
APART = [
    {"gpu", "npu"},
    {"production", "vllm"},
    {"production", "pool"},
    {"production", "fleet"},
    {"small", "pool"},
    {"clients", "endpoints"},
    {"small", "jobs"},
]


def fits(names: tuple[str, ...]) -> bool:
    places = sum(name in MODELS for name in names)
    return places <= 1 and not any(pair <= set(names) for pair in APART) and ("vllm" not in names or places == 1)


# Any three settings together.
COMBINATIONS = [names for count in range(4) for names in itertools.combinations(SETTINGS, count) if fits(names)]
QUICK = [
    (),
    ("production", "gpu", "hub", "clients"),
    ("npu", "claim", "small"),
    ("hub", "vllm", "endpoints", "pool"),
    ("claim", "jobs", "adapters", "pool", "fleet"),
    ("claim", "small", "vllm"),
]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, "template", "demo", str(CHART), *arguments], capture_output=True, text=True)


@functools.cache
def rendered(names: tuple[str, ...]) -> tuple[Document, ...]:
    done = helm(*(argument for name in names for argument in SETTINGS[name]))
    assert done.returncode == 0, done.stderr
    return yaml_documents(done.stdout)


def of_kind(documents: tuple[Document, ...], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: tuple[Document, ...]) -> dict[str, Document]:
    """{name of the service of ours: its pods' template}"""
    templates = [document["spec"]["template"] for document in of_kind(documents, "Deployment")]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def container(template: Document) -> Document:
    [only] = template["spec"]["containers"]
    return only


def all_pods(documents: tuple[Document, ...]) -> dict[str, Document]:
    """{name: template} of all pods, those of vLLM with the labels that LeaderWorkerSet gives them."""
    found = pods(documents)
    for document in of_kind(documents, "LeaderWorkerSet"):
        for name, index in (("leader", "0"), ("worker", "1")):
            template = document["spec"]["leaderWorkerTemplate"][f"{name}Template"]
            labels = {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/worker-index": index}
            found[f"vllm-{name}"] = {**template, "metadata": {**template["metadata"], "labels": labels}}
    return found


def matches(selector: dict[str, str], template: Document) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


def check_schemas(documents: tuple[Document, ...]) -> None:
    for document in documents:
        if (document["apiVersion"], document["kind"]) in SPECS:
            check_resource(document)
        elif document["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_references(documents: tuple[Document, ...]) -> None:
    """Selectors find the pods of one service, services their ports, mounts their volumes."""
    templates = all_pods(documents)
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels", selector)
        if labels:
            found = [name for name, template in templates.items() if matches(labels, template)]
            component = document["metadata"]["labels"]["app.kubernetes.io/component"]
            groups = {"Service": ["vllm-leader"], "NetworkPolicy": ["vllm-leader", "vllm-worker"]}
            assert found == (groups[document["kind"]] if component == "vllm" else [component])
    for service in of_kind(documents, "Service"):
        [template] = [pod for pod in templates.values() if matches(service["spec"]["selector"], pod)]
        ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    for policy in of_kind(documents, "NetworkPolicy"):
        ports = {port["name"] for pod in templates.values() for port in container(pod).get("ports", ())}
        rules = [*policy["spec"]["ingress"], *policy["spec"]["egress"]]
        named = {port["port"] for rule in rules for port in rule.get("ports", ())}
        assert {port for port in named if isinstance(port, str)} <= ports
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
    """Router and gateway call a service each at a port of it, or the endpoints at a named port."""
    ports = {
        f"{service['metadata']['name']}:{port[key]}"
        for service in of_kind(documents, "Service")
        for port in service["spec"]["ports"]
        for key in ("port", "name")
    }
    flags = ("--tokenizer=", "--backend=", "--router=")
    called = [
        target
        for template in pods(documents).values()
        for argument in container(template)["args"]
        if argument.startswith(flags)
        for target in argument.split("=", 1)[1].split(",")
    ]
    backends = sum(name in all_pods(documents) for name in ("generation", "vllm-leader"))
    assert len(called) == backends + (2 if "gateway" in pods(documents) else 1)
    [namespace] = {document["metadata"].get("namespace") for document in documents if document["kind"] == "Service"}
    for target in called:
        service = service_of(target)
        if service is None:
            assert target.removeprefix(f"{scheme_of(target)}://") in ports
        else:
            assert (f"{service.name}:{service.port}" in ports, service.namespace) == (True, namespace)
    assert [scheme_of(target) for target in called].count("vllm") == ("vllm-leader" in all_pods(documents))


def check_flags(documents: tuple[Document, ...]) -> None:
    """Each service takes its command line: the flags are its own, and their values together make a configuration."""
    for name, template in pods(documents).items():
        if name in ROLES:
            arguments = container(template)["args"]
            fields = {bound.flag: bound.name for bound in options_of(ROLES[name].config_class())}
            pairs = [argument.partition("=")[::2] for argument in arguments if argument.startswith("--")]
            assert [flag for flag, _ in pairs if flag not in fields] == []
            # Folders of mounts, which are not here.
            mounts = {mount["mountPath"] for mount in container(template)["volumeMounts"]}
            pairs = [(flag, str(ROOT) if text in mounts else text) for flag, text in pairs]
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


def check_rights(documents: tuple[Document, ...]) -> None:
    """Only a router that watches endpoints has a token, and its account the right to that alone."""
    with_token = {name for name, pod in all_pods(documents).items() if pod["spec"]["automountServiceAccountToken"]}
    roles, bindings = of_kind(documents, "Role"), of_kind(documents, "RoleBinding")
    assert with_token == ({"router"} if roles else set())
    for role, binding in zip(roles, bindings, strict=True):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        [subject] = binding["subjects"]
        assert subject["name"] == pods(documents)["router"]["spec"]["serviceAccountName"]
        assert subject["namespace"] == role["metadata"]["namespace"] == binding["metadata"]["namespace"]


def check_pool(documents: tuple[Document, ...]) -> None:
    """A pool's port is that of the gateway, which shows its metrics without a token and allows the route's names."""
    for pool in of_kind(documents, "InferencePool"):
        routes = {route["metadata"]["name"]: route for route in of_kind(documents, "HTTPRoute")}
        route = routes[pool["metadata"]["name"]]
        if pool["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "generation":
            check_generation_pool(documents, pool, route)
            continue
        gateway = container(pods(documents)["gateway"])
        http = [port["containerPort"] for port in gateway["ports"] if port["name"] == "http"]
        assert pool["spec"]["targetPorts"] == [{"number": port} for port in http]
        assert not [argument for argument in gateway["args"] if argument.startswith("--metrics-token-file")]
        assert f"--allowed-hosts={','.join(route['spec']['hostnames'])}" in gateway["args"]
        references = [one for rule in route["spec"]["rules"] for one in rule["backendRefs"]]
        services = {service["metadata"]["name"]: service["spec"] for service in of_kind(documents, "Service")}
        assert [one["kind"] for one in references] == ["InferencePool", "Service"]
        assert references[0]["name"] == pool["metadata"]["name"]
        assert references[1]["port"] in [port["port"] for port in services[references[1]["name"]]["ports"]]
        paths = [match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]]
        assert set(paths) <= set(POSTED)


def check_generation_pool(documents: tuple[Document, ...], pool: Document, route: Document) -> None:
    """Pods of the pool speak vLLM's gRPC, in the clear, and the Gateway may call them; the route has calls of it."""
    template = pods(documents)["generation"]
    assert matches(pool["spec"]["selector"]["matchLabels"], template)
    grpc = [port["containerPort"] for port in container(template)["ports"] if port["name"] == "grpc"]
    assert pool["spec"]["targetPorts"] == [{"number": port} for port in grpc]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    arguments = container(template)["args"]
    assert {"--vllm-engine", "--insecure-bind"} <= set(arguments)
    # The picker sends no token for metrics.
    assert not [argument for argument in arguments if argument.startswith("--auth-token-file")]
    [rule] = route["spec"]["rules"]
    assert [(one["kind"], one["name"]) for one in rule["backendRefs"]] == [("InferencePool", pool["metadata"]["name"])]
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    methods = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert {match["path"]["value"] for match in rule["matches"]} <= methods
    for policy in of_kind(documents, "NetworkPolicy"):
        if matches(policy["spec"]["podSelector"]["matchLabels"], template):
            peers = policy["spec"]["ingress"][0]["from"]
            assert {"namespaceSelector": {"matchLabels": {"app": "gateways"}}} in peers
            assert len(peers) == 2, "its router, too"


def check_groups(documents: tuple[Document, ...]) -> None:
    """Leader and workers of vLLM differ in what serves; each group is one torch.distributed job."""
    for document in of_kind(documents, "LeaderWorkerSet"):
        names = ("vllm-leader", "vllm-worker")
        leader, worker = (container(all_pods(documents)[name]) for name in names)
        serving = {"--grpc", "--host=0.0.0.0", "--port=8000"}
        assert set(leader["args"]) - set(worker["args"]) == serving
        assert set(worker["args"]) - set(leader["args"]) == {"--headless"}
        # Flags of vLLM 0.32 (vllm/engine/arg_utils.py). The variables are those of api/leaderworkerset/v1.
        wanted = {
            *("--distributed-executor-backend=mp", "--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)"),
            *("--master-addr=$(LWS_LEADER_ADDRESS)", "--master-port=29500"),
        }
        assert wanted <= set(leader["args"])
        assert "ports" not in worker
        assert "readinessProbe" not in worker
        # LeaderWorkerSet makes a service of the set's own name.
        assert document["metadata"]["name"] not in {one["metadata"]["name"] for one in of_kind(documents, "Service")}


def metric_names() -> set[str]:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+)` \| (?:gauge|counter) \|", page, re.MULTILINE))


@needs_helm
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=[] if names in QUICK else [pytest.mark.slow])
        for names in dict.fromkeys([*QUICK, *COMBINATIONS])
    ],
    ids=lambda names: "+".join(names) or "defaults",
)
def test_what_values_give_is_valid_and_fits_together(names: tuple[str, ...]) -> None:
    documents = rendered(names)
    check_references(documents)
    check_addresses(documents)
    check_flags(documents)
    check_pods(documents)
    check_rights(documents)
    check_pool(documents)
    check_groups(documents)
    check_schemas(documents)


def test_autoscalers_name_metrics_that_exist() -> None:
    """Of the gateway too, once it is one of the services."""
    template = (CHART / "templates" / "autoscalers.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r'"(penstock_\w+)"', template))
    assert len(used) == 4
    assert {name for name in used if "gateway" in ROLES or "gateway" not in name} <= metric_names()


def test_the_drain_is_that_of_the_services() -> None:
    values = read_yaml(CHART / "values.yaml")
    assert values["drain"]["graceSeconds"] == ServerConfig().drain_grace_seconds


def test_what_is_made_from_the_values_is_up_to_date() -> None:
    """Schema, README, and with helm the kustomize base."""
    stale = [path.name for path, text in chart_values.files().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python -m tools.chart_values"


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
        ("generation.enabled=false", "vllm.enabled"),
        ("vllm.enabled=true", "model.source"),
        ("vllm.enabled=true,model.source=hub,model.name=q", "vllm.image"),
        ("vllm.enabled=true,model.source=hub,model.name=q,vllm.image=v", "model.servedName"),
        ("vllm.enabled=true,model.source=hub,model.name=q,tls.enabled=true,tls.secretName=a", "tls.enabled"),
        ("vllm.enabled=true,model.source=hub,model.name=q,vllm.image=v,model.servedName=q,vllm.size=3", "vllm.size"),
        ("inferencePool.enabled=true,tls.enabled=true,tls.secretName=a", "tls.enabled"),
        ("inferencePool.enabled=true,gateway.enabled=false", "gateway.enabled"),
        ("inferencePool.failureMode=Never", "failureMode"),
        ("generationPool.enabled=true,tls.enabled=true,tls.secretName=a", "tls.enabled"),
        ("generationPool.enabled=true,auth.tokenSecret=a", "auth.tokenSecret"),
        ("generationPool.enabled=true", "generationPool.clients"),
        ("router.discovery=endpoints,serviceAccount.create=false", "serviceAccount.name"),
        ("router.discovery=etcd", "discovery"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, named: str) -> None:
    done = helm("--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


@needs_helm
def test_options_become_flags_as_they_are_written() -> None:
    done = helm("--set", "generation.options.max-context=2000000,generation.options.load-tokenizer=false")
    documents = yaml_documents(done.stdout)
    arguments = container(pods(documents)["generation"])["args"]
    assert {"--kv-memory=1GiB", "--max-context=2000000", "--no-load-tokenizer"} <= set(arguments)


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl")
@pytest.mark.parametrize("folder", ["base", "overlays/claim"])
def test_kustomize_gives_what_is_valid_and_fits_together(folder: str) -> None:
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(ROOT / "deploy" / "kustomize" / folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = yaml_documents(done.stdout)
    assert set(pods(documents)) >= {"tokenizer", "generation", "router"}
    check_references(documents)
    check_addresses(documents)
    check_flags(documents)
    check_schemas(documents)


def rendered_with(*settings: str) -> tuple[Document, ...]:
    done = helm(*(argument for setting in settings for argument in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    return yaml_documents(done.stdout)


@needs_helm
def test_vllm_may_be_the_only_backend() -> None:
    documents = rendered_with(
        "generation.enabled=false,vllm.enabled=true,vllm.image=v:1,vllm.size=1,model.source=hub,model.name=q",
        "model.servedName=q,vllm.options.tensor-parallel-size=8,vllm.options.pipeline-parallel-size=null",
    )
    assert "generation" not in pods(documents)
    check_references(documents)
    check_addresses(documents)
    check_schemas(documents)
    arguments = container(all_pods(documents)["vllm-leader"])["args"]
    assert "--tensor-parallel-size=8" in arguments
    assert not [argument for argument in arguments if argument.startswith(("--nnodes", "--pipeline"))]


@needs_helm
def test_the_pods_of_a_group_reach_each_other() -> None:
    documents = rendered(("hub", "vllm"))
    [policy] = [one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"].endswith("-vllm")]
    own = {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}
    assert {"from": [own]} in policy["spec"]["ingress"]
    assert {"to": [own]} in policy["spec"]["egress"]


def test_the_picker_reads_metrics_of_the_gateway() -> None:
    """EndpointPickerConfig of llm-d-router, as read in 2026: its plugins refer to each other by name."""
    config = read_yaml(CHART / "picker.yaml")
    assert (config["apiVersion"], config["kind"]) == ("inference.networking.x-k8s.io/v1alpha1", "EndpointPickerConfig")
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in config["plugins"]}
    profiles = [plugin for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    sources = config["dataLayer"]["sources"]
    extractors = [extractor for source in sources for extractor in source["extractors"]]
    assert {one["pluginRef"] for one in [*profiles, *sources, *extractors]} == plugins.keys()
    parameters = plugins["core-metrics-extractor"]["parameters"]
    [engine] = parameters["engineConfigs"]
    assert engine.pop("name") == parameters["defaultEngine"]
    assert engine.keys() <= {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec"}
    gateway = {name for name in metric_names() if name.startswith("penstock_gateway_")}
    assert set(engine.values()) <= gateway


def test_the_picker_of_generation_reads_what_it_serves() -> None:
    """Parser and scorers of llm-d-router. They read metrics by vLLM's names, as `--vllm-engine` shows them."""
    config = read_yaml(CHART / "picker-generation.yaml")
    plugins = {plugin["type"] for plugin in config["plugins"]}
    profiles = [plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    parsers = [plugin["pluginRef"] for plugin in config["requestHandler"]["parsers"]]
    assert {*profiles, *parsers} == plugins
    assert parsers == ["vllmgrpc-parser"]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"), {"leaderWorkerTemplate": {"size": 2}}),
        (("inference.networking.k8s.io/v1", "InferencePool"), {"extensionRef": {"name": "picker"}}),
        (("gateway.networking.k8s.io/v1", "HTTPRoute"), {"rules": [{"matches": [{"path": "/"}]}]}),
        (("serving.kserve.io/v1alpha1", "ServingRuntime"), {"containers": []}),
        (("serving.kserve.io/v1beta1", "InferenceService"), {"predictor": {"model": {"format": "x"}}}),
    ],
)
def test_a_wrong_resource_would_be_seen(kind: tuple[str, str], spec: Document) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_resource({"apiVersion": kind[0], "kind": kind[1], "metadata": {"name": "a"}, "spec": spec})


def test_a_wrong_pod_in_a_resource_would_be_seen() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod({"spec": {"containers": [{"name": "a", "image": "b", "imagePolicy": "Always"}]}})
