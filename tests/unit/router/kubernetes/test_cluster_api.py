"""Address of the API: the cluster's own, a named one, and every way in which there is none."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from factories.source_tree import ROOT
from penstock.common.errors import StartupError
from penstock.router.config import RouterConfig
from penstock.router.kubernetes.cluster_api import find_api

CA = (ROOT / "tests/factories/servers/tls/ca.pem").read_text(encoding="ascii")
TARGET = "k8s://generation:grpc"
INSIDE = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's folder, as a pod has it."""
    for name, text in {"token": "abc\n", "ca.crt": CA, "namespace": "models"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_pod_finds_its_cluster(account: Path) -> None:
    api = find_api(RouterConfig(kubernetes_account=str(account)), INSIDE, TARGET)
    assert (api.authority, api.token(), api.namespace()) == ("10.96.0.1:6443", "abc", "models")
    assert api.tls is not None
    (account / "token").write_text("next")
    assert api.token() == "next"


def test_an_address_of_the_sixth_version_is_in_brackets(account: Path) -> None:
    config = RouterConfig(kubernetes_account=str(account))
    assert find_api(config, {"KUBERNETES_SERVICE_HOST": "fd00::1"}, TARGET).authority == "[fd00::1]:443"


def test_a_proxy_gets_no_token(account: Path) -> None:
    config = RouterConfig(kubernetes_account=str(account), kubernetes_api="http://127.0.0.1:8001")
    api = find_api(config, INSIDE, TARGET)
    assert (api.authority, api.token(), api.tls) == ("127.0.0.1:8001", "", None)


def test_without_an_account_the_namespace_is_the_default_one(tmp_path: Path) -> None:
    config = RouterConfig(kubernetes_account=str(tmp_path / "none"), kubernetes_api="http://localhost:8001")
    assert find_api(config, {}, TARGET).namespace() == "default"


def test_outside_a_cluster_the_backend_is_refused_by_name() -> None:
    with pytest.raises(
        StartupError, match=r"k8s://generation:grpc.*KUBERNETES_SERVICE_HOST.*--kubernetes-api"
    ) as caught:
        find_api(RouterConfig(), {}, TARGET)
    assert caught.value.flag == "--backend"


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:6443", "https://", "https://h:x", "https://h:99999", "https://h/api", "ftp://h", "http://10.0.0.1:8001"],
)
def test_an_address_of_another_form_is_refused(address: str, account: Path) -> None:
    with pytest.raises(StartupError) as caught:
        find_api(RouterConfig(kubernetes_account=str(account), kubernetes_api=address), {}, TARGET)
    assert caught.value.flag == "--kubernetes-api"


@pytest.mark.parametrize("name", ["token", "ca.crt"])
def test_an_account_without_its_files_is_refused(name: str, account: Path) -> None:
    (account / name).unlink()
    with pytest.raises(StartupError, match="automountServiceAccountToken") as caught:
        find_api(RouterConfig(kubernetes_account=str(account)), INSIDE, TARGET)
    assert caught.value.flag == "--kubernetes-account"
    assert name in caught.value.message


def test_a_certificate_that_is_none_is_refused(account: Path) -> None:
    (account / "ca.crt").write_text("no certificate")
    with pytest.raises(StartupError) as caught:
        find_api(RouterConfig(kubernetes_account=str(account)), INSIDE, TARGET)
    assert caught.value.flag == "--kubernetes-account"


def test_a_clusters_certificate_needs_no_more_than_kubernetes_asks_for(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ssl.create_default_context

    def strict(*, cadata: str) -> ssl.SSLContext:
        """As Python 3.13 makes it."""
        context = make(cadata=cadata)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    api = find_api(RouterConfig(kubernetes_account=str(account)), INSIDE, TARGET)
    assert api.tls is not None
    assert not api.tls.verify_flags & ssl.VERIFY_X509_STRICT
    assert api.tls.verify_mode is ssl.CERT_REQUIRED
    assert api.tls.check_hostname
