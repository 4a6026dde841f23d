"""Service in this process: `penstock serve tokenizer|generation|router|gateway`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from penstock.cli.console import say
from penstock.cli.progress_display import serve_display
from penstock.cli.serve.device_packages import check_device_packages
from penstock.cli.serve.full_device import lose_what_does_not_fit
from penstock.cli.serve.reports import Reporter
from penstock.common.checkpoint import DEMO_HEAD, OWN_HEAD, check_model
from penstock.common.config import ProcessConfig, ServerConfig, from_env_and_flags
from penstock.common.environment import ENV_PREFIX, current_environment, prepare_environment
from penstock.common.errors import StartupError
from penstock.common.event_loop import loop_factory
from penstock.common.event_loop import run as run_on
from penstock.common.process import die_with_parent
from penstock.common.progress import ReportsProgress

# The name under which `serve [MODEL]` is registered; it is never typed.
EVERYTHING = "all"
# Flags that describe the parent to a process of the tree. They are in no configuration, since children inherit
# variables.
PARENT_OPTIONS = ("report_fd", "parent_pid", "gate_fd")
# Python's own first threshold is 700: with hundreds of live requests a collection would visit all their objects every
# few milliseconds, though reference counts free nearly all garbage.
_GC_THRESHOLDS = (20_000, 10, 10)


@dataclass(frozen=True)
class Role:
    """Paths of a service's configuration and application; imported when needed, since applications are heavy."""

    name: str
    config_path: str
    app_path: str
    # A light function of the configuration, called before the application is imported. Its result is the application's
    # third argument.
    preload_path: str | None = None
    # A light function of the configuration, called in place of the service: an exit code, or None when it is to serve.
    rank_path: str | None = None
    # A light function from flags to flags: it reads files with further flags.
    flags_path: str | None = None
    protocol: str = "gRPC"

    def flags(self, given: dict[str, object]) -> dict[str, object]:
        """Return the flags and those that files add. Raises StartupError."""
        return given if self.flags_path is None else cast("dict[str, object]", _load(self.flags_path)(given))

    def be_rank(self, config: ProcessConfig) -> int | None:
        """Run as a part of another process's service if a launcher asks for it: the exit code. Raises StartupError."""
        return None if self.rank_path is None else cast("int | None", _load(self.rank_path)(config))

    def begin(self, config: ProcessConfig) -> tuple[Any, ...]:
        """Begin work that runs while the application is imported; return the application's further arguments."""
        return () if self.preload_path is None else (_load(self.preload_path)(config),)

    def config_class(self) -> type[ProcessConfig]:
        """Import the configuration dataclass (light)."""
        return cast("type[ProcessConfig]", _load(self.config_path))

    def app_class(self) -> Callable[..., Any]:
        """Import the application. Raises StartupError when its dependencies are not installed."""
        try:
            return cast("Callable[..., Any]", _load(self.app_path))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("penstock"):
                raise
            raise StartupError(
                f"{self.name} needs {error.name}: pip install 'penstock[{self.name}]'", flag=self.name
            ) from error


ROLES = {
    role.name: role
    for role in (
        Role("tokenizer", "penstock.tokenizer.config:TokenizerConfig", "penstock.tokenizer.app:TokenizerApp"),
        Role(
            "generation",
            "penstock.generation.config:GenerationServiceConfig",
            "penstock.generation.app:GenerationApp",
            preload_path="penstock.generation.startup.preload:begin",
            rank_path="penstock.generation.parallel.launched_rank:run_rank",
            flags_path="penstock.compat.mindie.model_settings:with_model_config",
        ),
        Role("router", "penstock.router.config:RouterConfig", "penstock.router.app:RouterApp"),
        Role("gateway", "penstock.gateway.config:GatewayConfig", "penstock.gateway.app:GatewayApp", protocol="HTTP"),
    )
}


class Gate:
    """Gate at which a worker waits until all of them are loaded."""

    def __init__(self, fd: int, reporter: Reporter) -> None:
        """Make it. The pipe `fd` ends when the gate opens; with an fd below 0 the gate is open."""
        self._fd = fd
        self._reporter = reporter
        if fd >= 0:
            os.set_inheritable(fd, False)

    async def __call__(self) -> None:
        """Report to the parent, then wait."""
        self._reporter.loaded()
        if self._fd >= 0:
            loop = asyncio.get_running_loop()
            opened = asyncio.Event()
            loop.add_reader(self._fd, opened.set)
            try:
                await opened.wait()
            finally:
                loop.remove_reader(self._fd)
                os.close(self._fd)


def begin_log(service: str, given: dict[str, Any]) -> None:
    """Make the log JSON before anything can fail, if it will be JSON: errors of the start are records, too.

    `given`: the flags. Their errors are reported elsewhere.
    """
    from penstock.common.logging import configure_logging, is_json_log, log_crashes

    wanted = str(given.get("log_format") or current_environment().get(f"{ENV_PREFIX}LOG_FORMAT") or "auto")
    if wanted != "console" and sys.stderr is not None and (wanted == "json" or not sys.stderr.isatty()):
        configure_logging(service, log_format="json", debug=bool(given.get("debug")))
    if is_json_log():
        log_crashes()


def check_models(config: ProcessConfig) -> None:
    """Look for the models' folders, and the device's packages, before imports that take seconds.

    Raises StartupError naming MODEL or the flag.

    A service without a MODEL needs no embedded model either: its image has none.
    """
    if hasattr(config, "model"):
        check_model(config.model)
    if hasattr(config, "device"):
        check_device_packages(config.device)
    for flag, name in (("--assistant-model", "assistant_model"), ("--draft-head", "draft_head")):
        if (drafts := getattr(config, name, None)) is None or drafts in (DEMO_HEAD, OWN_HEAD):
            continue
        try:
            check_model(drafts)
        except StartupError as error:
            raise StartupError(f"{flag}: {error.message}", flag=flag) from error


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run_role(
    role: Role, overrides: dict[str, object], *, report_fd: int | None, parent_pid: int | None, gate_fd: int | None
) -> int:
    """Serve until a signal to stop; return the exit code. Raises StartupError unless it was reported to the parent."""
    lose_what_does_not_fit()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    reporter = Reporter(report_fd)
    begin_log(role.name, overrides)
    try:
        overrides = role.flags(overrides)
        config = from_env_and_flags(role.config_class(), overrides)
        check_models(config)
        if (code := role.be_rank(config)) is not None:
            return code
        if isinstance(config, ServerConfig) and getattr(config, "processes", 1) > 1:
            from penstock.cli.serve.worker_processes import run_workers

            return run_workers(role.name, overrides, config, reporter)
        return _serve(role, config, reporter, Gate(gate_fd, reporter) if gate_fd is not None else None)
    except StartupError as error:
        return reporter.give_up(error, debug=bool(overrides.get("debug")))


def _serve(role: Role, config: ProcessConfig, reporter: Reporter, gate: Gate | None) -> int:
    from penstock.common.logging import configure_logging

    prepare_environment(getattr(config, "threads", None))
    configure_logging(
        role.name,
        log_format=config.log_format,
        level=config.log_level,
        debug=config.debug,
        bounds=config.log_bounds,
    )
    began = time.monotonic()
    if not reporter.is_heard:
        say(f"{role.name}: loading")
    make_loop = loop_factory(config.event_loop, is_tls=config.is_tls)
    display = serve_display(config)
    # Nearly all objects made before it is ready stay. Collections would take a fifth of the imports' time.
    gc.disable()
    begun = role.begin(config)
    app_class = role.app_class()

    async def run() -> int:
        from prometheus_client import CollectorRegistry

        from penstock.common.addresses import BoundAddresses
        from penstock.serving.server import run_until_stopped

        registry = CollectorRegistry()
        service = app_class(config, registry, *begun)
        if isinstance(service, ReportsProgress):
            service.bind_progress(reporter.progress if reporter.is_heard else display.show)

        def on_ready(bound: BoundAddresses) -> None:
            # Modules, tables and the model live as long as the process. Without this every full collection would visit
            # all of them again, and stop every thread's Python for tens of milliseconds.
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            gc.enable()
            display.close()
            reporter.ready(role.name, bound, service.status_lines())
            if not reporter.is_heard:
                for line in service.status_lines():
                    say(f"  {line}")
                metrics = f" · metrics http://{bound.metrics}/metrics" if bound.metrics else ""
                say(f"READY {role.name} · {role.protocol} {bound.grpc}{metrics} · {time.monotonic() - began:.1f} s")

        return await run_until_stopped(
            service,
            config,
            registry=registry,
            on_listening=lambda bound: reporter.listening(role.name, bound),
            on_ready=on_ready,
            gate=gate,
        )

    try:
        return run_on(run(), make_loop)
    finally:
        display.close()
