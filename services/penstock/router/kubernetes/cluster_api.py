"""Address of the Kubernetes API, and what a pod's service account asks it with."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.common.addresses import join_address
from penstock.common.errors import StartupError
from penstock.router.config import RouterConfig

_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ClusterApi:
    """One API server as a router reaches it."""

    host: str
    port: int
    # None: a proxy on this machine, which adds credentials of its own.
    tls: ssl.SSLContext | None
    # Folder of the service account. Its token is replaced while the process runs, so it is read for each call.
    account: Path

    @property
    def authority(self) -> str:
        """Host and port as a request names them."""
        return join_address(self.host, self.port)

    def token(self) -> str:
        """Read the token; empty where a proxy adds one. Raises OSError."""
        return "" if self.tls is None else (self.account / "token").read_text(encoding="ascii").strip()

    def namespace(self) -> str:
        """Read the namespace of the router's pod; `default` outside of one."""
        try:
            return (self.account / "namespace").read_text(encoding="ascii").strip() or "default"
        except OSError:
            return "default"


def find_api(config: RouterConfig, environ: Mapping[str, str], target: str) -> ClusterApi:
    """Find the API that a k8s:// `target` is read from: --kubernetes-api, or the cluster's own.

    Raises StartupError naming --backend outside a cluster, --kubernetes-api for an address that cannot be used, and
    --kubernetes-account for a folder without token or certificate.
    """
    account = Path(config.kubernetes_account)
    if config.kubernetes_api is None:
        host, port = environ.get(_HOST, ""), environ.get(_PORT, "443")
        if not host or not port.isdigit():
            raise StartupError(
                f"--backend {target!r}: this is no pod of a Kubernetes cluster ({_HOST} is not set): name the API by "
                "--kubernetes-api, or use host:port",
                flag="--backend",
            )
        return ClusterApi(host, int(port), _trust(account), account)
    try:
        parts = urlsplit(config.kubernetes_api)
        host, port_number = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port_number = "", 0
    if not host or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
        raise StartupError(
            f"--kubernetes-api {config.kubernetes_api}: expected https://HOST:PORT", flag="--kubernetes-api"
        )
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise StartupError(
            f"--kubernetes-api {config.kubernetes_api}: http:// is for a proxy on this machine", flag="--kubernetes-api"
        )
    return ClusterApi(host, port_number, _trust(account) if parts.scheme == "https" else None, account)


def _trust(account: Path) -> ssl.SSLContext:
    """TLS that trusts the cluster's certificate alone."""
    try:
        (account / "token").read_text(encoding="ascii")
        context = ssl.create_default_context(cadata=(account / "ca.crt").read_text(encoding="ascii"))
        # Python 3.13 asks for extensions that the certificates of many clusters lack, and Kubernetes itself does not.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context
    except (OSError, ValueError, ssl.SSLError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no certificate"
        named = getattr(error, "filename", None) or account / "ca.crt"
        raise StartupError(
            f"--kubernetes-account {account}: {named} cannot be read: {why}. A pod has it where "
            "automountServiceAccountToken is true",
            flag="--kubernetes-account",
        ) from error
