"""Command `penstock serve [MODEL]`: tokenizer, generation × N, router and HTTP gateway as one process tree."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from penstock import __version__
from penstock.cli.console import complain_or_log
from penstock.cli.flags import as_flags
from penstock.cli.missing_packages import require_stack
from penstock.cli.progress_display import ProgressDisplay, parent_display
from penstock.cli.serve.full_device import lose_what_does_not_fit
from penstock.cli.serve.model_catalogue import LocalModels, read_catalogue, to_toml, with_addresses
from penstock.cli.serve.reports import READY, Report, Reporter
from penstock.cli.serve.service_process import ROLES, Role, begin_log, check_models
from penstock.cli.serve.supervisor import ServiceEnded, ServiceProcess, Supervisor, first_of
from penstock.common.addresses import PortTaken, require_free_port
from penstock.common.checkpoint import model_name
from penstock.common.config import ChannelConfig, ServerConfig, from_env_and_flags
from penstock.common.environment import ENV_PREFIX, current_environment, usable_cores
from penstock.common.errors import StartupError
from penstock.common.options import BoundOption, option, options_of
from penstock.common.ports import HTTP_PORT
from penstock.common.process import die_with_parent
from penstock.common.progress import StageProgress
from penstock.common.units import parse_size
from penstock.generation.host.memory import parse_memory
from penstock.generation.parallel.launch import refuse_launcher

MAX_LINES = 15
# KV pool of each model on demand where --kv-memory is not given: `auto` would give all memory to the first.
CATALOGUE_KV_BYTES = 256 << 20
# Options that the tree sets itself, or that are of no use inside it.
WIRED = {
    *("tokenizer", "backend", "router", "start_timeout_seconds", "empty", "metrics_token_file"),
    # The tree's own --models names folders, and it makes the router's file.
    *("models", "models_interval_seconds"),
    # The tree has a tokenizer of its own, for the same MODEL.
    *("model_config", "tokenizer_path", "load_tokenizer"),
    *(field.name for field in fields(ChannelConfig)),
}
# The gateway alone calls a port with TLS, the router's; the other processes talk over loopback in the clear.
GATEWAY_CHANNEL = {
    *("channel_tls", "channel_tls_ca", "channel_tls_cert", "channel_tls_key", "channel_tls_server_name"),
}
# Fields of ServerConfig for the router, which clients reach; the tree gives the gateway those that it needs. The other
# fields go to every process.
FRONT = {
    *("host", "port", "metrics_port", "health_socket"),
    *("tls_cert", "tls_key", "tls_client_ca", "auth_token_file", "insecure_bind"),
}
# Options with one value for several services. Any other name that two services share is set per service.
SHARED = {"model", "served_model_name"}
# Flags of the gateway's own TLS: the same as the router's.
_TLS_FLAGS = {"--tls-cert": "tls_cert", "--tls-key": "tls_key", "--tls-client-ca": "tls_client_ca"}
# The gateway's flags that the tree has under another name.
_GATEWAY_FLAGS = {"--port": "--http-port"}
# The tree waits for its children as long as they live: loading a large model may take any time.
FOREVER = "24h"
# Likeness, as difflib has it, from which a MODEL that is not there is a misspelt service: tokeniser, generator, route.
SERVICE_LIKENESS = 0.8
# Routine logs of children would bury the start-up print, and nobody wants JSON lines in it.
QUIET_LEVEL = "warning"


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Options that only the tree has."""

    generation_replicas: int = option(
        1, "Generation processes; each loads the model.", group="Process tree", minimum=1, maximum=64
    )
    models: str | None = option(
        None,
        "Folder of model folders, or a file (TOML) that names some, in place of MODEL: each is loaded when a request "
        "asks for it, and leaves when it is idle or others need its place.",
        group="Process tree",
        metavar="DIR|FILE",
    )
    model_slots: int = option(
        2,
        "With --models: generation processes, each for one loaded model. A model needs two for a roll.",
        group="Process tree",
        minimum=1,
        maximum=64,
    )
    models_memory: int = option(
        0,
        "With --models: memory that loaded models may take together, weights and KV pools; 0: as many as there are "
        "slots.",
        group="Process tree",
        parse=parse_size,
        metavar="SIZE",
        minimum=0,
    )
    http_port: int = option(
        HTTP_PORT,
        "Port of the HTTP gateway (OpenAI's API, the chat page); 0 takes a free one, -1 has none. "
        "With --tls-cert it needs --channel-tls-ca, to trust the router.",
        group="Process tree",
        minimum=-1,
        maximum=65535,
    )


def tree_options() -> list[BoundOption]:
    """List the options of `penstock serve`: the tree's, those of all processes, and those of a single service."""
    common = [bound for bound in options_of(ROLES["router"].config_class()) if bound.name in _server_fields()]
    own = [bound for role in ROLES for bound in _options_of_own(role)]
    unique = {bound.name: bound for bound in [*own, *options_of(TreeConfig), *common]}
    return list(unique.values())


def _server_fields() -> set[str]:
    return {field.name for field in fields(ServerConfig)}


def _options_of_own(role: str) -> list[BoundOption]:
    names = _own(role)
    return [bound for bound in options_of(ROLES[role].config_class()) if bound.name in names]


def _own(role: str) -> set[str]:
    """Names of options that go to `role`, because it alone has them or because they are shared."""
    names = {
        name: {bound.name for bound in options_of(ROLES[name].config_class())} - _server_fields() for name in ROLES
    }
    elsewhere = set().union(*(names[other] for other in ROLES if other != role))
    channel = GATEWAY_CHANNEL if role == "gateway" else set()
    return (names[role] - elsewhere - WIRED) | (names[role] & (SHARED | channel))


def role_arguments(role: str, given: dict[str, Any]) -> list[str]:
    """Make `serve ROLE --flag value …` from the tree's options."""
    kept = set() if role == "router" else FRONT
    names = _own(role) | (_server_fields() - kept)
    bound_options = {bound.name: bound for bound in options_of(ROLES[role].config_class())}
    arguments = ["serve", role]
    for name in [name for name in bound_options if name in names and name in given]:
        arguments += as_flags(bound_options[name], given[name])
    return arguments


@dataclass
class Tree:
    """One run of the tree."""

    given: dict[str, Any]
    config: TreeConfig
    front: ServerConfig
    model: str
    reporter: Reporter
    has_gateway: bool = False
    # Models that are loaded on demand; None: the tree serves MODEL.
    local: LocalModels | None = None
    began: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    display: ProgressDisplay = field(init=False)
    # What goes with the tree.
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.display = parent_display(self.front, "serve")

    async def run(self) -> int:
        """Start, serve, stop; return the exit code. Raises StartupError when a child could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        supervisor = Supervisor(drain_grace_seconds=self.front.drain_grace_seconds, on_progress=self._on_progress)
        try:
            try:
                is_ready = await self._start(supervisor)
            finally:
                self.display.close()
            return await self._serve(supervisor) if is_ready else 0
        except ServiceEnded as ended:
            complain_or_log(str(ended))
            return ended.exit_code
        finally:
            await supervisor.stop(self.hurry)
            self.stack.close()

    def _signalled(self) -> None:
        if self.ended.is_set():
            self.hurry.set()
            return
        self.ended.set()
        self.display.close()
        self._say(f"stopping: live work has {self.front.drain_grace_seconds:g} s; a second signal stops at once")

    async def _start(self, supervisor: Supervisor) -> bool:
        self._say(f"penstock {__version__}: loading {self.model}")
        tokenizers, backends = await self._start_inner(supervisor)
        below = [*tokenizers, *backends]
        if not await first_of([child.listening for child in below], self.ended, lambda _: None):
            return False
        router = await supervisor.start("router", self._router(tokenizers, backends), without=gateway_variables())
        everyone = [*below, router]
        if self.has_gateway:
            if not await first_of([router.listening], self.ended, lambda _: None):
                return False
            # `_gateway` passes the needed ones of the router's variables, such as PENSTOCK_HOST, as flags.
            # A token of its own would let in everybody who reaches its port.
            without = front_variables() | {f"{ENV_PREFIX}CHANNEL_TOKEN_FILE"}
            everyone.append(
                await supervisor.start("gateway", self._gateway(router), without=without, renamed=_GATEWAY_FLAGS)
            )
        if not await first_of(
            [child.ready for child in everyone], self.ended, lambda index: self._show(everyone, everyone[index])
        ):
            return False
        self._show_ready(everyone)
        return True

    async def _start_inner(self, supervisor: Supervisor) -> tuple[list[ServiceProcess], list[ServiceProcess]]:
        """Start tokenizers and generation processes; with a catalogue a tokenizer for each model, and empty slots."""
        inner = front_variables() | gateway_variables()
        if self.local is None:
            tokenizer = await supervisor.start("tokenizer", self._inner("tokenizer"), without=inner)
            names = [f"generation {n + 1}" if n else "generation" for n in range(self.config.generation_replicas)]
            return [tokenizer], [
                await supervisor.start(name, self._inner("generation"), without=inner) for name in names
            ]
        root = self.local.root
        tokenizers = [
            await supervisor.start(
                f"tokenizer {entry.name}",
                [*self._inner("tokenizer"), str(root / entry.path), "--served-model-name", entry.name],
                without=inner,
            )
            for entry in self.local.file.models
        ]
        slot = [*self._inner("generation"), "--empty", "--model-root", str(root)]
        slots = [await supervisor.start(f"slot {n + 1}", slot, without=inner) for n in range(self.config.model_slots)]
        return tokenizers, slots

    def _inner(self, role: str) -> list[str]:
        arguments = role_arguments(role, self.given)
        arguments += ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", *self._quiet()]
        replicas = self.config.model_slots if self.local is not None else self.config.generation_replicas
        if role == "generation" and replicas > 1 and "threads" not in self.given:
            arguments += ["--threads", str(max(1, usable_cores() // replicas))]
        if role == "generation" and self.local is not None and "kv_memory" not in self.given:
            arguments += ["--kv-memory", str(CATALOGUE_KV_BYTES)]
        if self.front.auth_token_file is not None:
            arguments += ["--auth-token-file", self.front.auth_token_file]
        return arguments

    def _router(self, tokenizers: list[ServiceProcess], backends: list[ServiceProcess]) -> list[str]:
        arguments = [*role_arguments("router", self.given), *self._quiet(), "--start-timeout-seconds", FOREVER]
        if self.local is not None:
            arguments += ["--models", self._write_models(self.local, tokenizers, backends)]
        else:
            arguments += ["--tokenizer", tokenizers[0].address]
            for backend in backends:
                arguments += ["--backend", backend.address]
        if self.front.auth_token_file is not None:
            arguments += ["--channel-token-file", self.front.auth_token_file]
        return arguments

    def _write_models(self, local: LocalModels, tokenizers: list[ServiceProcess], slots: list[ServiceProcess]) -> str:
        """Write the router's file of models, and return its path; it goes with this process."""
        addresses = [child.address for child in tokenizers], [child.address for child in slots]
        text = to_toml(with_addresses(local.file, *addresses, self.config.models_memory))
        folder = self.stack.enter_context(TemporaryDirectory(prefix="penstock-models-"))
        path = Path(folder) / "models.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def _gateway(self, router: ServiceProcess) -> list[str]:
        host, _, port = router.address.rpartition(":")
        # A router that listens on every address listens on loopback, too.
        address = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        arguments = [*role_arguments("gateway", self.given), *self._quiet()]
        arguments += ["--port", str(self.config.http_port), "--router", f"{address}:{port}"]
        arguments += ["--host", self.front.host, *(["--insecure-bind"] if self.front.insecure_bind else [])]
        arguments += ["--start-timeout-seconds", FOREVER]
        if self.front.auth_token_file is not None:
            arguments += ["--metrics-token-file", self.front.auth_token_file]
        for flag, value in _TLS_FLAGS.items():
            if (path := getattr(self.front, value)) is not None:
                arguments += [flag, path]
        return arguments

    def _quiet(self) -> list[str]:
        """Return the flags of processes without a level set by flag or variable."""
        if "log_level" in self.given or f"{ENV_PREFIX}LOG_LEVEL" in current_environment():
            return []
        return ["--log-level", QUIET_LEVEL]

    async def _serve(self, supervisor: Supervisor) -> int:
        stop = asyncio.create_task(self.ended.wait())
        broken = asyncio.create_task(supervisor.wait_any_end())
        await asyncio.wait([stop, broken], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if broken.done() and not self.ended.is_set():
            child = broken.result()
            raise ServiceEnded(child.name, child.exit_code)
        broken.cancel()
        await supervisor.stop(self.hurry)
        codes = [child.ended.result() for child in supervisor.children]
        return 0 if not any(codes) else 1

    def _on_progress(self, child: str, progress: StageProgress | None) -> None:
        if progress is None:
            self.display.drop(child)
        elif not self.reporter.is_heard:
            self.display.show(progress, child)

    def _say(self, line: str) -> None:
        if not self.reporter.is_heard:
            self.display.say(line)

    def _show(self, everyone: list[ServiceProcess], child: ServiceProcess) -> None:
        report = child.ready.result()
        facts = max(0, (MAX_LINES - 2) // len(everyone) - 1)
        self._say(f"{child.name}: ready on {child.address} after {time.monotonic() - self.began:.1f} s")
        for line in report.lines[:facts]:
            self._say(f"  {line}")

    def _show_ready(self, everyone: list[ServiceProcess]) -> None:
        addresses = {child.name: child.address for child in everyone}
        metrics = {child.name: where for child in everyone for where in child.ready.result().metrics.values()}
        seconds = time.monotonic() - self.began
        lines = tuple(line for child in everyone for line in child.ready.result().lines)
        self.reporter.send(Report(READY, addresses, metrics, lines))
        # Inner processes listen on loopback, in the clear.
        schemes = {name: "https" for name in ("router", "gateway") if self.front.is_tls}
        shown = ", ".join(f"{schemes.get(name, 'http')}://{where}/metrics" for name, where in metrics.items())
        self._say(f"metrics: {shown or 'off'}{self._moved_metrics(metrics)}")
        at = f"{schemes.get('gateway', 'http')}://{addresses.get('gateway')}"
        http = f" · chat page {at}/ · HTTP {at}/v1" if "gateway" in addresses else ""
        self._say(f"READY · gRPC {addresses['router']}{http} · {seconds:.1f} s")

    def _moved_metrics(self, metrics: dict[str, str]) -> str:
        """Return words for the router's metrics if they are not at their usual port, which somebody has."""
        usual = self.front.usual_metrics_port
        is_usual = metrics.get("router", "").endswith(f":{usual}")
        return "" if self.front.metrics_port is not None or is_usual else f" (port {usual} is taken)"


def front_variables() -> set[str]:
    """PENSTOCK_* variables for the router alone: inner processes listen on loopback, without TLS."""
    options = options_of(ROLES["router"].config_class())
    return {bound.env for bound in options if bound.name in FRONT}


def gateway_variables() -> set[str]:
    """PENSTOCK_* variables of the gateway's connection to the router; other connections must not use them."""
    return {bound.env for bound in options_of(ChannelConfig) if bound.name in GATEWAY_CHANNEL}


def _wants_gateway(given: dict[str, Any], config: TreeConfig, front: ServerConfig, channel: ChannelConfig) -> bool:
    """True when a gateway is part of the tree.

    Raises StartupError naming the flag to change when it was asked for and cannot run.
    """
    if config.http_port < 0:
        return False
    is_asked = "http_port" in given or f"{ENV_PREFIX}HTTP_PORT" in current_environment()
    why = None
    flag = "--http-port"
    if front.is_tls and not (channel.channel_tls or channel.channel_tls_ca):
        flag, why = "--channel-tls-ca", "with --tls-cert the HTTP gateway needs the router's CA, to trust the router"
    elif front.tls_client_ca is not None and channel.channel_tls_cert is None:
        flag, why = "--channel-tls-cert", "with --tls-client-ca the HTTP gateway needs a certificate of its own"
    elif any(find_spec(name) is None for name in ("starlette", "uvicorn", "httptools")):
        why = "the HTTP gateway is not installed: pip install 'penstock[gateway]'"
    if why is not None:
        if is_asked:
            raise StartupError(f"{why} (or --http-port -1)", flag=flag)
        return False
    if config.http_port and config.http_port in (front.port, *front.metrics_ports[:1]):
        raise StartupError(
            "--http-port is the port of another process of the tree: choose another port", flag="--http-port"
        )
    return True


def _require_free_ports(front: ServerConfig, http_port: int | None) -> None:
    """Check the ports, the gateway's included if there is one. Raises StartupError naming the flags of all taken ones.

    With default flags a tree clashes with another one on more than one port: each alone would be the next run's error.
    """
    wanted = {"--port": front.port, "--metrics-port": front.metrics_port or 0}
    if http_port is not None:
        wanted["--http-port"] = http_port
    taken: dict[str, PortTaken] = {}
    for flag, port in wanted.items():
        try:
            require_free_port(front.host, max(port, 0), flag)
        except PortTaken as error:
            taken[flag] = error
    if not taken:
        return
    what = ", ".join(error.message for error in taken.values())
    another = "another one, or 0 for a free one" if len(taken) == 1 else "other ones, or 0 for free ones"
    none = ", or -1 for no HTTP gateway" if list(taken) == ["--http-port"] else ""
    raise StartupError(f"{what}: give {' and '.join(taken)} {another}{none}", flag=next(iter(taken)))


def _check(given: dict[str, Any]) -> tuple[ServerConfig, ChannelConfig, str]:
    """Return the router's configuration, the gateway's connection to it, and the model's name.

    Faults that would stop a service later, such as a wrong option or a missing folder, stop the tree now.
    """
    _refuse_misspelt_service(given.get("model"))
    read = {
        role: from_env_and_flags(kind.config_class(), _only(given, (_own(role) | _server_fields()) & _names(kind)))
        for role, kind in ROLES.items()
    }
    for config in read.values():
        check_models(config)
    front = cast("ServerConfig", read["router"])
    generation: Any = read["generation"]
    refuse_launcher(generation.tensor_parallel)
    channel = cast("ChannelConfig", read["gateway"])
    return front, channel, (*generation.served_model_name, model_name(generation.model))[0]


def _local_models(given: dict[str, Any], config: TreeConfig) -> LocalModels | None:
    """Return the models of --models, if it is there. Raises StartupError."""
    if config.models is None:
        return None
    for name in ("model", "served_model_name", "model_root", "lora", "generation_replicas"):
        if name in given:
            flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
            raise StartupError(f"{flag} is for one model: leave it out with --models", flag=flag)
    generation: Any = from_env_and_flags(ROLES["generation"].config_class(), _only(given, {"kv_memory"}))
    router: Any = from_env_and_flags(ROLES["router"].config_class(), _only(given, {"max_models"}))
    kv_bytes = max(parse_memory(generation.kv_memory) or CATALOGUE_KV_BYTES, 0)
    return read_catalogue(config.models, router.max_models, kv_bytes)


def _refuse_misspelt_service(model: str | None) -> None:
    """Refuse a MODEL that is nearly the name of a service, before a hub is asked for it. Raises StartupError."""
    near = get_close_matches(model.lower(), ROLES, n=1, cutoff=SERVICE_LIKENESS) if model is not None else []
    # Asked for near names alone: a name may be longer than a path can be.
    if near and not Path(model or "").exists():
        raise StartupError(f"MODEL {model}: no such folder; the service is `penstock serve {near[0]}`", flag="MODEL")


def _names(role: Role) -> set[str]:
    return {bound.name for bound in options_of(role.config_class())}


def _only(given: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def run_tree(
    given: dict[str, Any], *, report_fd: int | None, parent_pid: int | None, gate_fd: int | None = None
) -> int:
    """Serve until a signal to stop; return the exit code. Raises StartupError unless it was reported to the parent."""
    lose_what_does_not_fit()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    reporter = Reporter(report_fd)
    begin_log("serve", given)
    tree_names = {bound.name for bound in options_of(TreeConfig)}
    try:
        config = from_env_and_flags(TreeConfig, _only(given, tree_names))
        # First: a MODEL beside --models is refused, be it there or not.
        local = _local_models(given, config)
        front, channel, model = _check(given)
        require_stack()
        has_gateway = _wants_gateway(given, config, front, channel)
        # Last: faults of the options come first, since they are the same on every machine.
        _require_free_ports(front, config.http_port if has_gateway else None)
        shown = model if local is None else f"{len(local.file.models)} models on demand"
        return asyncio.run(Tree(given, config, front, shown, reporter, has_gateway, local).run())
    except StartupError as error:
        return reporter.give_up(error, debug=bool(given.get("debug")))
