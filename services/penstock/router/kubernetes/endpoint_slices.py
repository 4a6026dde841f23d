"""Addresses in a service's EndpointSlices (discovery.k8s.io/v1). A service has one or more; each names its pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.common.addresses import join_address
from penstock.router.backend_targets import KubernetesService, is_address


def slices_path(service: KubernetesService, namespace: str) -> str:
    """Path of the list of a service's slices. Names were checked: none has a character that a path would change."""
    return (
        f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace or namespace}/endpointslices"
        f"?labelSelector=kubernetes.io%2Fservice-name%3D{service.name}"
    )


def ready_addresses(slices: Iterable[Mapping[str, Any]], service: KubernetesService) -> tuple[str, ...]:
    """Return `host:port` of each ready endpoint, once and in order.

    Of a service with both families the IPv4 addresses: they name the same pods. A port by name is that of the slice;
    a slice without it has none.
    """
    by_family: dict[str, set[str]] = {}
    for one in slices:
        port = _port(one, service.port)
        if port is None:
            continue
        found = by_family.setdefault(str(one.get("addressType")), set())
        for endpoint in one.get("endpoints") or ():
            # A pod that ends is not ready; unknown counts as ready.
            if (endpoint.get("conditions") or {}).get("ready") is False:
                continue
            # All addresses of an endpoint are the same pod.
            address = next(iter(endpoint.get("addresses") or ()), "")
            if is_address(address):
                found.add(join_address(address, port))
    return tuple(sorted(by_family.get("IPv4") or by_family.get("IPv6") or ()))


def _port(one: Mapping[str, Any], port: str) -> int | None:
    if port.isdigit():
        return int(port)
    ports = (item.get("port") for item in one.get("ports") or () if item.get("name") == port)
    return next((number for number in ports if isinstance(number, int)), None)
