"""Addresses of slices: what counts, and of which port."""

from __future__ import annotations

from factories.servers.kubernetes_api import endpoint_slice
from penstock.router.backend_targets import KubernetesService
from penstock.router.kubernetes.endpoint_slices import ready_addresses, slices_path

BY_NAME, BY_NUMBER = KubernetesService("generation", "grpc"), KubernetesService("generation", "7000", "models")


def test_ready_endpoints_count_once() -> None:
    slices = [
        endpoint_slice("10.0.0.2", "10.0.0.1", unready=("10.0.0.3",)),
        # A pod may be in two slices while the controller moves it.
        endpoint_slice("10.0.0.1", name="generation-b", port=50052),
    ]
    assert ready_addresses(slices, BY_NAME) == ("10.0.0.1:50052", "10.0.0.2:50052")
    assert ready_addresses(slices, BY_NUMBER) == ("10.0.0.1:7000", "10.0.0.2:7000")


def test_unknown_readiness_is_readiness() -> None:
    one = endpoint_slice("10.0.0.1", ready=None)
    del endpoint_slice("10.0.0.2")["endpoints"][0]["conditions"]
    assert ready_addresses([one], BY_NAME) == ("10.0.0.1:50052",)


def test_a_slice_without_the_port_has_no_backend() -> None:
    assert ready_addresses([endpoint_slice("10.0.0.1", port_name="metrics")], BY_NAME) == ()


def test_each_slice_has_its_own_port() -> None:
    slices = [endpoint_slice("10.0.0.1", port=1), endpoint_slice("10.0.0.1", name="b", port=2)]
    assert ready_addresses(slices, BY_NAME) == ("10.0.0.1:1", "10.0.0.1:2")


def test_one_family_of_two_is_taken() -> None:
    four, six = endpoint_slice("10.0.0.1"), endpoint_slice("fd00::1", name="six", family="IPv6")
    names = endpoint_slice("pod.example.org", name="names", family="FQDN")
    assert ready_addresses([six, four, names], BY_NAME) == ("10.0.0.1:50052",)
    assert ready_addresses([six], BY_NAME) == ("[fd00::1]:50052",)
    assert ready_addresses([names], BY_NAME) == ()


def test_a_slice_may_be_empty() -> None:
    bare = {"metadata": {"name": "generation-a"}, "addressType": "IPv4", "endpoints": None, "ports": None}
    assert ready_addresses([bare], BY_NAME) == ()
    assert ready_addresses([bare], BY_NUMBER) == ()


def test_the_path_names_namespace_and_service() -> None:
    assert slices_path(BY_NUMBER, "other").startswith("/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?")
    assert slices_path(BY_NAME, "other").endswith(
        "/other/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dgeneration"
    )
