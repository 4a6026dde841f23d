"""Published types of other projects' resources that we write: fields, what is required, enumerations.

Their schemas are on no package index, so they are data here, written from the sources named beside them as they were
in 2026: no release is vouched for, and no cluster took part. Pods inside them are Kubernetes' own, held against its
schemas by `check_pod`.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = "1.33"
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_HOST = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_ANYTHING: dict[str, Any] = {}
_POD = {"type": "object", "required": ["spec"]}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


def _list(items: Any, least: int = 0, most: int = 1024) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# LeaderWorkerSet, leaderworkerset.x-k8s.io/v1: api/leaderworkerset/v1 of kubernetes-sigs/lws.
_LEADER_WORKER_SET = _object(
    ("leaderWorkerTemplate",),
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_object(subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_object(
        ("type",),
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_object(
            partition={"type": "integer"},
            maxUnavailable={"type": ["integer", "string"]},
            maxSurge={"type": ["integer", "string"]},
        ),
    ),
    leaderWorkerTemplate=_object(
        ("workerTemplate",),
        leaderTemplate=_POD,
        workerTemplate=_POD,
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
        subGroupPolicy=_object(
            subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]}, subGroupSize={"type": "integer"}
        ),
        volumeClaimTemplates=_list(_ANYTHING),
        persistentVolumeClaimRetentionPolicy=_ANYTHING,
    ),
)

# InferencePool, inference.networking.k8s.io/v1: api/v1 of kubernetes-sigs/gateway-api-inference-extension. A
# Service as the picker needs a port.
_INFERENCE_POOL = _object(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=_object(("matchLabels",), matchLabels=_LABELS),
    targetPorts=_list(_object(("number",), number=_PORT), 1, 8),
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_object(
        ("name", "port"),
        group={"type": "string"},
        kind={"type": "string"},
        name=_NAME,
        port=_object(("number",), number=_PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)

# HTTPRoute, gateway.networking.k8s.io/v1: the standard channel of kubernetes-sigs/gateway-api, in part from memory.
_HTTP_ROUTE = _object(
    parentRefs=_list(
        _object(
            ("name",),
            group={"type": "string"},
            kind={"type": "string"},
            name=_NAME,
            namespace=_NAME,
            sectionName=_NAME,
            port=_PORT,
        ),
        most=32,
    ),
    hostnames=_list(_HOST, most=16),
    rules=_list(
        _object(
            name=_NAME,
            matches=_list(
                _object(
                    path=_object(
                        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value={"type": "string", "pattern": "^/", "maxLength": 1024},
                    ),
                    headers=_list(_ANYTHING, most=16),
                    queryParams=_list(_ANYTHING, most=16),
                    method={"enum": ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]},
                ),
                most=64,
            ),
            filters=_list(_ANYTHING, most=16),
            backendRefs=_list(
                _object(
                    ("name",),
                    group={"type": "string"},
                    kind={"type": "string"},
                    name=_NAME,
                    namespace=_NAME,
                    port=_PORT,
                    weight={"type": "integer", "minimum": 0, "maximum": 1_000_000},
                    filters=_list(_ANYTHING, most=16),
                ),
                most=16,
            ),
            timeouts=_object(
                request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
                backendRequest={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
            ),
        ),
        1,
        16,
    ),
)

# ServingRuntime, serving.kserve.io/v1alpha1: pkg/apis/serving/v1alpha1 of kserve/kserve. A pod's fields are beside
# the runtime's own.
_SERVING_RUNTIME = _object(
    ("containers",),
    supportedModelFormats=_list(
        _object(
            ("name",),
            name={"type": "string"},
            version={"type": "string"},
            autoSelect={"type": "boolean"},
            priority={"type": "integer", "minimum": 1},
        ),
        1,
    ),
    multiModel={"type": "boolean"},
    disabled={"type": "boolean"},
    protocolVersions=_list({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
    workerSpec=_ANYTHING,
    containers=_list(_ANYTHING, 1),
    volumes=_list(_ANYTHING),
    nodeSelector=_LABELS,
    affinity=_ANYTHING,
    tolerations=_list(_ANYTHING),
    labels=_LABELS,
    annotations={"type": "object", "additionalProperties": {"type": "string"}},
    imagePullSecrets=_list(_ANYTHING),
    hostIPC={"type": "boolean"},
    replicas={"type": "integer"},
    storageHelper=_object(disabled={"type": "boolean"}),
)

# InferenceService, serving.kserve.io/v1beta1: the fields that the examples use, of kserve/kserve, in part from memory.
_INFERENCE_SERVICE = _object(
    ("predictor",),
    predictor=_object(
        ("model",),
        minReplicas={"type": "integer", "minimum": 0},
        maxReplicas={"type": "integer", "minimum": 0},
        model=_object(
            ("modelFormat",),
            modelFormat=_object(("name",), name={"type": "string"}, version={"type": "string"}),
            runtime=_NAME,
            storageUri={"type": "string", "pattern": "^[a-z0-9]+://"},
            protocolVersion={"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]},
            args=_list({"type": "string"}),
            env=_list(_ANYTHING),
            resources=_ANYTHING,
        ),
    ),
)

SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _LEADER_WORKER_SET,
    ("inference.networking.k8s.io/v1", "InferencePool"): _INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): _SERVING_RUNTIME,
    ("serving.kserve.io/v1beta1", "InferenceService"): _INFERENCE_SERVICE,
}


def check_resource(document: dict[str, Any]) -> None:
    """Hold a resource against its published type, and the pods in it against Kubernetes' schemas.

    Raises jsonschema.ValidationError.
    """
    spec = document["spec"]
    jsonschema.validate(
        document,
        _object(
            ("apiVersion", "kind", "metadata", "spec"),
            apiVersion={"type": "string"},
            kind={"type": "string"},
            metadata=_object(("name",), name=_NAME, namespace=_NAME, labels=_LABELS, annotations={"type": "object"}),
            spec=SPECS[document["apiVersion"], document["kind"]],
        ),
    )
    if document["kind"] == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]
        for name in template.keys() & {"leaderTemplate", "workerTemplate"}:
            check_pod(template[name])
    if document["kind"] == "ServingRuntime":
        check_pod({"spec": {name: spec[name] for name in spec.keys() & {"containers", "volumes"}}})


def check_pod(template: dict[str, Any]) -> None:
    """Hold a pod's template against Kubernetes' schema, strictly. Raises kubernetes_validate.ValidationError."""
    labels = template.get("metadata", {}).get("labels") or {"app": "any"}
    pod = {"metadata": {**template.get("metadata", {}), "labels": labels}, "spec": template["spec"]}
    deployment = {"selector": {"matchLabels": labels}, "template": pod}
    kubernetes_validate.validate(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}, "spec": deployment},
        KUBERNETES,
        strict=True,
    )
