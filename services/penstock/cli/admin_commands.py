"""Commands `penstock admin`: the life of running generation services, and of a router's models, for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from penstock.cli.client.connection import GROUP as CONNECTION
from penstock.cli.client.connection import ConnectionConfig, open_operator_client
from penstock.cli.console import say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.common.options import option, options_of

EPILOG = f"""A router sends requests elsewhere while a backend drains or reloads. It asks the backend that
--backend names, and takes the tokens of its --admin-token-file (--token-file here).
docs/guide/generation-service.md explains it.

{ENV_NOTE}

Examples:

  penstock admin drain --grace-seconds 30

  penstock admin resume

  penstock admin pause --max-seconds 60

  penstock admin reload --backend 10.0.0.7:50052

  penstock admin roll smollm2 --grace-seconds 30          all its backends, one after the other

  penstock admin drain --address 127.0.0.1:50052          past the router"""

GROUP = "Running requests"


@dataclass(frozen=True, kw_only=True)
class AdminConfig(ConnectionConfig):
    """Configuration: a router or a generation service, and the backend that a router asks."""

    # The plain name is the router's own variable.
    backend: str | None = option(
        None,
        "Backend for the router to ask, if it has several: its address, or its name in the router's own --backend.",
        group=CONNECTION,
        env="PENSTOCK_ADMIN_BACKEND",
        metavar="NAME_OR_ADDRESS",
    )


@dataclass(frozen=True, kw_only=True)
class DrainConfig(AdminConfig):
    """Configuration of calls that let live requests end."""

    grace_seconds: float | None = option(
        None,
        "Time for live requests before they are aborted, and moved by a router; without it, wait for all of them.",
        group=GROUP,
        env="PENSTOCK_ADMIN_GRACE_SECONDS",
        minimum=0,
    )
    timeout_seconds: float = option(
        300.0,
        "Time to wait beyond the grace; then give up, while a drain continues.",
        group=GROUP,
        flag="--timeout",
        env="PENSTOCK_ADMIN_TIMEOUT",
        minimum=0.1,
    )

    @property
    def wait_seconds(self) -> float:
        """Time that the whole call may take."""
        return self.timeout_seconds + (self.grace_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class PauseConfig(AdminConfig):
    """Configuration of a pause."""

    max_seconds: float | None = option(
        None,
        "Time after which it resumes by itself; without it, the service's --max-pause-seconds.",
        group=GROUP,
        env="PENSTOCK_ADMIN_MAX_SECONDS",
        minimum=0.001,
    )


def run_drain(given: Overrides) -> None:
    """Let a service end its requests. Raises PenstockError, StartupError."""
    config: DrainConfig = _config(DrainConfig, given)
    with open_operator_client(config, config.backend) as client:
        left = client.drain(grace=config.grace_seconds, backend=config.backend or "", timeout=config.wait_seconds)
    say("drained: it takes no requests until `penstock admin resume`" + (f"; {left} still run" if left else ""))


def run_pause(given: Overrides) -> None:
    """Let a service hold its steps. Raises PenstockError, StartupError."""
    config: PauseConfig = _config(PauseConfig, given)
    with open_operator_client(config, config.backend) as client:
        paused = client.pause(max_seconds=config.max_seconds, backend=config.backend or "")
    say(
        f"paused for at most {paused.max_seconds:g} s, or until `penstock admin resume`; "
        f"{paused.live_requests} requests are held"
    )


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


def run_reload_models(given: Overrides) -> None:
    """Let a router read its file of models. Raises PenstockError, StartupError."""
    config: AdminConfig = _config(AdminConfig, given)
    with open_operator_client(config, config.backend) as client:
        done = client.reload_models()
    for kind in ("added", "changed", "removed"):
        for name in getattr(done, kind):
            say(f"{name}: {kind}")
    for failure in done.failed:
        say(f"{failure.model}: as before, {failure.cause}")
    if not (done.added or done.changed or done.removed or done.failed):
        say("nothing has changed")


def run_roll(given: Overrides) -> None:
    """Let a router reload a model's backends one after the other. Raises PenstockError, StartupError."""
    from penstock.v1 import router_pb2

    name = str(given.pop("name", None) or "")
    config: DrainConfig = _config(DrainConfig, given)

    def show(step: router_pb2.RollModelResponse) -> None:
        say(f"{step.backend}: {router_pb2.RollStep.Name(step.step).removeprefix('ROLL_STEP_').lower()}")

    with open_operator_client(config, config.backend) as client:
        client.roll_model(name, grace=config.grace_seconds, on_step=show, timeout=config.wait_seconds)
    say("rolled")


def _config(kind: Any, given: Overrides) -> Any:
    from penstock.common.config import from_env_and_flags  # brings grpc, which --help must not wait for

    return from_env_and_flags(kind, given)


commands = typer.Typer(no_args_is_help=True, add_completion=False, epilog=EPILOG)
commands.command("drain")(
    command(options_of(DrainConfig), run_drain, "Refuse new requests, and wait until the live ones are over.")
)
commands.command("pause")(
    command(
        options_of(PauseConfig),
        run_pause,
        "Hold the engine's steps and refuse new requests; live ones keep their KV and go on after a resume.",
    )
)
commands.command("resume")(
    command(options_of(AdminConfig), run_resume, "Take requests again, after a drain, and go on after a pause.")
)
commands.command("reload")(
    command(
        options_of(DrainConfig),
        run_reload,
        "Read the model's weights again from the same folder, between a drain and a resume.",
    )
)
commands.command("reload-models")(
    command(options_of(AdminConfig), run_reload_models, "Have a router read its file of models (--models) now.")
)
commands.command("roll")(
    command(
        options_of(DrainConfig),
        run_roll,
        "Have a router reload a model's backends one after the other: it is served all the time.",
        first=[argument("name", "NAME", "Model, as ListModels has it; may be left out where there is one.")],
    )
)
