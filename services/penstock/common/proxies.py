"""Proxies from the environment, and the connections that use them. Loopback never does, whatever the variables say.

grpc's C core takes `grpc_proxy`, `https_proxy` and `http_proxy` for every address that `no_grpc_proxy` or `no_proxy`
does not name, this machine's own included (https://github.com/grpc/grpc/blob/master/doc/environment_variables.md).
"""

from __future__ import annotations

import ipaddress

from penstock.common.environment import current_environment
from penstock.common.shown_url import shown_url

# In grpc's order: the first that is set, in lower case.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "passthrough:")


def is_this_machine(host: str) -> bool:
    """True for an address or a name that leads back here. A name is not resolved."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def proxy_of(address: str) -> tuple[str, str] | None:
    """Return variable and URL of the proxy for `address` (host:port, or a gRPC target); None if there is none."""
    host = _host_of(address)
    if not host or is_this_machine(host):
        return None
    environment = current_environment()
    found = next(((name, environment[name]) for name in _PROXIES if environment.get(name)), None)
    if found is None or _is_excepted(host, next((environment[one] for one in _EXCEPTIONS if environment.get(one)), "")):
        return None
    return found


def proxy_options(address: str) -> list[tuple[str, str | int]]:
    """gRPC channel arguments that keep `address` off a proxy, if it has none."""
    return [] if proxy_of(address) else [("grpc.enable_http_proxy", 0)]


def through_proxy(address: str) -> str:
    """Words for an error of a connection that goes through a proxy, without its password; else nothing."""
    found = proxy_of(address)
    if found is None:
        return ""
    name, url = found
    host, shown = _host_of(address), shown_url(url if "://" in url else f"http://{url}")
    return f"connections to {host} go through the proxy {shown} of {name}; set no_proxy={host} to avoid it"


def _host_of(address: str) -> str:
    """Return the host of an address; nothing for a Unix socket."""
    if address.startswith(("unix:", "unix-abstract:", "vsock:")):
        return ""
    for scheme in _SCHEMES:
        address = address.removeprefix(scheme)
    if "," in address:
        # Several addresses of one server: it is on this machine if all of them are.
        hosts = [_host_of(one) for one in address.split(",")]
        return next((host for host in hosts if not is_this_machine(host)), hosts[0])
    # dns://AUTHORITY/HOST:PORT names a server to ask.
    address = address.rpartition("/")[2]
    host, _, port = address.rpartition(":")
    is_bare = host.count(":") > 0 and not host.endswith("]")
    return (host if port.isdigit() and host and not is_bare else address).strip("[]")


def _is_excepted(host: str, listed: str) -> bool:
    """True when a list such as `.example.com,10.0.0.0/8,*` names a host."""
    name = host.lower()
    for entry in (one.strip().lower() for one in listed.split(",")):
        bare = entry.removeprefix("*").lstrip(".")
        if entry == "*" or (bare and (name == bare or name.endswith(f".{bare}"))):
            return True
        if "/" in entry and _is_within(name, entry):
            return True
    return False


def _is_within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
