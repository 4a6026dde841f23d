"""Commands `penstock admin drain | resume | reload`: the life of a running generation service, for its operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.client.connection import GROUP as CONNECTION
from penstock.cli.client.connection import ConnectionConfig, open_operator_client
from penstock.cli.console import say
from penstock.common.options import option

if TYPE_CHECKING:
    from penstock.cli.flags import Overrides

GROUP = "Running requests"


@dataclass(frozen=True, kw_only=True)
class AdminConfig(ConnectionConfig):
    """Configuration: a router or a generation service, and the backend that a router asks."""

    # The plain name's variable is the router's own.
    backend: str | None = option(
        None,
        "Backend that the router asks, where it has several: its address, or its name in the router's own --backend.",
        group=CONNECTION,
        env="PENSTOCK_ADMIN_BACKEND",
        metavar="NAME_OR_ADDRESS",
    )


@dataclass(frozen=True, kw_only=True)
class DrainConfig(AdminConfig):
    """Configuration of calls that let live requests end."""

    grace_seconds: float | None = option(
        None,
        "Time that live requests have before they are aborted, which a router moves; without it all are waited for.",
        group=GROUP,
        env="PENSTOCK_ADMIN_GRACE_SECONDS",
        minimum=0,
    )
    timeout_seconds: float = option(
        300.0,
        "Give up waiting after this, beside the grace; a drain goes on.",
        group=GROUP,
        flag="--timeout",
        env="PENSTOCK_ADMIN_TIMEOUT",
        minimum=0.1,
    )

    @property
    def wait_seconds(self) -> float:
        """Time that the whole call may take."""
        return self.timeout_seconds + (self.grace_seconds or 0.0)


def run_drain(given: Overrides) -> None:
    """Let a service end its requests. Raises PenstockError, StartupError."""
    config: DrainConfig = _config(DrainConfig, given)
    with open_operator_client(config, config.backend) as client:
        left = client.drain(grace=config.grace_seconds, backend=config.backend or "", timeout=config.wait_seconds)
    say("drained: it takes no requests until `penstock admin resume`" + (f"; {left} still run" if left else ""))


def run_resume(given: Overrides) -> None:
    """Let a service take requests again. Raises PenstockError, StartupError."""
    config: AdminConfig = _config(AdminConfig, given)
    with open_operator_client(config, config.backend) as client:
        client.resume(backend=config.backend or "")
    say("resumed: it takes requests")


def run_reload(given: Overrides) -> None:
    """Let a service read its weights again. Raises PenstockError, StartupError."""
    from penstock.common.units import format_size

    config: DrainConfig = _config(DrainConfig, given)
    with open_operator_client(config, config.backend) as client:
        done = client.reload(grace=config.grace_seconds, backend=config.backend or "", timeout=config.wait_seconds)
    aborted = f"; {done.aborted_requests} requests were aborted" if done.aborted_requests else ""
    say(f"reloaded {format_size(done.weights_bytes)} of weights in {done.seconds:.1f} s{aborted}")


def _config(kind: Any, given: Overrides) -> Any:
    from penstock.common.config import from_env_and_flags  # brings grpc, which --help must not wait for

    return from_env_and_flags(kind, given)
