"""Targets: what --backend and --tokenizer name, taken apart.

host:port                                  a name in DNS, or an address
k8s://[NAMESPACE/]SERVICE:PORT             the ready endpoints of a Kubernetes service
vllm://…, sglang://…, vllm+k8s://…         the same, with another engine behind it
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from penstock.common.errors import StartupError

# Other engines as backends: see router.engines.
ENGINE_SCHEMES = ("vllm", "sglang")
SERVICE_SCHEME = "k8s"
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"(?:({_LABEL})/)?({_LABEL}):({_LABEL})")
# Of --backend.
_SCHEMES = (*ENGINE_SCHEMES, SERVICE_SCHEME, *(f"{engine}+{SERVICE_SCHEME}" for engine in ENGINE_SCHEMES))


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """Service with endpoints that are backends."""

    name: str
    # Number that the pods listen on, or the name of a port of the service.
    port: str
    # Empty: that of the router's pod.
    namespace: str = ""

    @property
    def host(self) -> str:
        """Name that certificates of its pods have."""
        return f"{self.name}.{self.namespace}.svc" if self.namespace else self.name


def scheme_of(target: str) -> str:
    """Scheme of a backend's engine, or empty for our own."""
    return _scheme(target).removesuffix(SERVICE_SCHEME).removesuffix("+")


def service_of(target: str) -> KubernetesService | None:
    """Kubernetes service that a checked target names; None where it names a host."""
    scheme = _scheme(target)
    if not scheme.endswith(SERVICE_SCHEME):
        return None
    match = _SERVICE.fullmatch(target.removeprefix(f"{scheme}://"))
    return KubernetesService(match[2], match[3], match[1] or "") if match is not None else None


def check_target(target: str, flag: str, *, has_schemes: bool) -> None:
    """Check the form of a target. Raises StartupError naming `flag`; `has_schemes`: backends may be named."""
    scheme = _scheme(target)
    if scheme and not (has_schemes and scheme in _SCHEMES):
        known = ", ".join(f"{one}://" for one in _SCHEMES)
        raise StartupError(f"{flag} {target!r}: only --backend has schemes: {known}", flag=flag)
    if not scheme.endswith(SERVICE_SCHEME):
        split_target(target, flag)
        return
    service = service_of(target)
    if service is None or (service.port.isdigit() and not 0 < int(service.port) < 65536):
        raise StartupError(f"{flag} {target!r}: expected {scheme}://[NAMESPACE/]SERVICE:PORT", flag=flag)


def split_target(target: str, flag: str) -> tuple[str, int]:
    """Host and port of a target that names a host: `host:port` or `[v6]:port`, be it behind the scheme of an engine.

    Raises StartupError naming `flag`.
    """
    scheme = _scheme(target)
    host, _, port = target.removeprefix(f"{scheme}://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise StartupError(f"{flag} {target!r}: expected host:port", flag=flag)
    return host.strip("[]"), int(port)


def is_address(host: str) -> bool:
    """True when `host` is an IP address already."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _scheme(target: str) -> str:
    scheme, separator, _ = target.partition("://")
    return scheme if separator else ""
