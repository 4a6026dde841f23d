"""Targets: each form, taken apart, and the mistakes in it."""

from __future__ import annotations

import pytest
from penstock.common.errors import StartupError
from penstock.router.backend_targets import KubernetesService, check_target, scheme_of, service_of, split_target
from penstock.router.config import RouterConfig


@pytest.mark.parametrize(
    ("target", "engine", "service"),
    [
        ("generation:50052", "", None),
        ("[::1]:50052", "", None),
        ("vllm://node:8000", "vllm", None),
        ("k8s://generation:grpc", "", KubernetesService("generation", "grpc")),
        ("k8s://models/generation:50052", "", KubernetesService("generation", "50052", "models")),
        ("vllm+k8s://models/big:8000", "vllm", KubernetesService("big", "8000", "models")),
        ("sglang+k8s://big:8000", "sglang", KubernetesService("big", "8000")),
    ],
)
def test_a_target_says_engine_and_service(target: str, engine: str, service: KubernetesService | None) -> None:
    RouterConfig(backend=(target,)).validate()
    assert scheme_of(target) == engine
    assert service_of(target) == service


@pytest.mark.parametrize(
    "target",
    [
        "k8s://generation",
        "k8s://generation:0",
        "k8s://generation:70000",
        "k8s://a/b/c:1",
        "k8s://Models/generation:1",
        "k8s://generation.models:1",
        "k8s://gener%2Fation:1",
        "k8s://generation?x=1:1",
        "k8s:///generation:1",
        "k8s+vllm://generation:1",
        "k8s+k8s://generation:1",
        "+k8s://generation:1",
        "vllm+://generation:1",
        "http://generation:1",
    ],
)
def test_another_form_is_refused_by_its_flag(target: str) -> None:
    with pytest.raises(StartupError) as caught:
        RouterConfig(backend=(target,)).validate()
    assert caught.value.flag == "--backend"
    assert target in caught.value.message


@pytest.mark.parametrize("target", ["k8s://tokenizer:1", "vllm://tokenizer:1"])
def test_a_tokenizer_has_no_scheme(target: str) -> None:
    with pytest.raises(StartupError, match=r"only --backend has schemes: .*k8s://"):
        RouterConfig(tokenizer=(target,)).validate()
    with pytest.raises(StartupError):
        check_target(target, "--models", has_schemes=False)


def test_a_certificate_names_the_service() -> None:
    assert KubernetesService("big", "8000", "models").host == "big.models.svc"
    assert KubernetesService("big", "8000").host == "big"
    assert split_target("vllm://[::1]:8000", "--backend") == ("::1", 8000)
