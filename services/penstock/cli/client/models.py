"""Commands `penstock models load|unload|info`: the model of a generation service."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.client.connection import GENERATION_HINT, ConnectionConfig, open_operator_client
from penstock.cli.client.connection import GROUP as CONNECTION
from penstock.cli.console import complain, say
from penstock.cli.flags import Overrides, argument, command
from penstock.cli.progress_display import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.options import BoundOption, option, options_of
from penstock.common.ports import GENERATION_PORT
from penstock.common.progress import StageProgress
from penstock.common.units import format_size
from penstock.generation.config import GenerationServiceConfig

if TYPE_CHECKING:
    from penstock_client import LoadProgress

EPILOG = """The service must allow it on its address (--model-access). docs/guide/loading-models.md
explains it.

Examples:

  penstock serve generation --empty

  penstock models load ./my-model --quantization int8

  penstock models load --path my-model            read by the service, below its --model-root

  penstock models unload --grace-seconds 30"""

# Fields of LoadModelOptions; help and parser are those of the flags of `penstock serve generation`.
LOAD_OPTIONS = (
    "dtype",
    "quantization",
    "kv_memory",
    "kv_cache_dtype",
    "block_size",
    "max_context",
    "prefix_cache",
    "max_batch_tokens",
    "max_running_sequences",
    "map_embeddings",
    "model_route",
    "self_check",
)


@dataclass(frozen=True, kw_only=True)
class ModelsConfig(ConnectionConfig):
    """Configuration: the generation service and the way to it."""

    # These have their own variables: the plain names are for the router's address and the backends of a router.
    address: str = option(
        f"127.0.0.1:{GENERATION_PORT}",
        "host:port of the generation service, or of a router, which asks a backend.",
        group=CONNECTION,
        env="PENSTOCK_MODELS_ADDRESS",
        metavar="HOST:PORT",
    )
    backend: str | None = option(
        None,
        "Backend behind the router, if it has several: its address, or its name in the router's own --backend.",
        group=CONNECTION,
        env="PENSTOCK_MODELS_BACKEND",
        metavar="NAME_OR_ADDRESS",
    )


@dataclass(frozen=True, kw_only=True)
class LoadConfig(ModelsConfig):
    """Configuration of `load`, except the options of the model itself."""

    name: str = option(
        "", "Name that callers use; by default the folder's own.", group="Model", env="PENSTOCK_MODELS_NAME"
    )
    path: str | None = option(
        None,
        "Folder below the service's --model-root that the service reads itself, in place of FOLDER.",
        group="Model",
        env="PENSTOCK_MODELS_PATH",
        metavar="PATH",
    )


@dataclass(frozen=True, kw_only=True)
class UnloadConfig(ModelsConfig):
    """Configuration of `unload`."""

    grace_seconds: float | None = option(
        None,
        "Time for live requests before they are aborted; without it, a model with live requests is not unloaded.",
        group="Model",
        env="PENSTOCK_MODELS_GRACE_SECONDS",
        minimum=0,
    )


def load_options() -> list[BoundOption]:
    """Return the flags of a model that a load may change."""
    return [bound for bound in options_of(GenerationServiceConfig) if bound.name in LOAD_OPTIONS]


def run_load(folder: str | None, given: Overrides) -> None:
    """Load a model. Raises StartupError for a wrong flag or folder, the service's PenstockError."""
    options = {bound.name: _value(bound, given.pop(bound.name)) for bound in load_options() if bound.name in given}
    config = from_env_and_flags(LoadConfig, given)
    if (folder is None) == (config.path is None):
        raise StartupError("give a FOLDER to send, or a --path for the service to read", flag="FOLDER")
    display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
    shown = config.name or config.path or str(folder)

    def show(progress: LoadProgress) -> None:
        state = StageProgress(progress.stage, shown, progress.done_bytes, progress.total_bytes, progress.ended)
        display.show(state)

    try:
        with open_operator_client(config, config.backend, GENERATION_HINT) as client:
            info = client.load_model(
                folder,
                path=config.path,
                name=config.name,
                options=options,
                on_progress=show,
                backend=config.backend or "",
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StartupError(f"{folder} is not a folder with a model: {error.strerror}", flag="FOLDER") from error
    finally:
        display.close()
    say(f"loaded {info.model} ({info.architecture}): {_pool(info)}")


def run_unload(given: Overrides) -> None:
    """End the model. Raises StartupError for a wrong flag, the service's PenstockError."""
    config = from_env_and_flags(UnloadConfig, given)
    with open_operator_client(config, config.backend, GENERATION_HINT) as client:
        # Aborted requests still get their last messages.
        wait = None if config.grace_seconds is None else config.grace_seconds + config.connect_timeout_seconds
        gone = client.unload_model(grace=config.grace_seconds, backend=config.backend or "", timeout=wait)
    before, after = format_size(gone.resident_bytes_before), format_size(gone.resident_bytes_after)
    say(f"unloaded {gone.name}: the process had {before} and has {after}")


def run_info(given: Overrides) -> None:
    """Show the model, or that there is none. Raises StartupError for a wrong flag, the service's PenstockError."""
    from penstock.v1 import common_pb2

    config = from_env_and_flags(ModelsConfig, given)
    with open_operator_client(config, config.backend, GENERATION_HINT) as client:
        info = client.model_info(backend=config.backend or "")
    state = common_pb2.ModelState.Name(info.state).removeprefix("MODEL_STATE_").lower()
    what = f"{info.model} ({info.architecture}): {_pool(info)}" if info.architecture else info.model or "no model"
    calls = "calls may load and unload" if info.can_load else "no call may load or unload"
    say(f"{what}; {state}, load {info.load_number}, {calls}")


def _pool(info: Any) -> str:
    tokens = info.kv.num_blocks // (sum(group.num_blocks for group in info.kv.groups) or 1) * info.kv.block_size
    devices = ", ".join(info.devices)
    return f"context {info.limits.max_context_tokens}, KV pool of {tokens} tokens, on {devices}{_weights(info)}"


def _weights(info: Any) -> str:
    """Return the form that a quantised checkpoint runs in; empty for another."""
    forms = ", ".join(f"{count} as {form}" for form, count in sorted(info.weight_forms.items()))
    return f", {info.checkpoint_format}: {forms}" if forms else ""


def _value(bound: BoundOption, given: object) -> object:
    """Return a flag's value. Raises StartupError."""
    try:
        value = bound.parse(given) if isinstance(given, str) else given
        bound.check(value)
    except ValueError as error:
        raise StartupError(f"{bound.flag} {given!r}: {error}", flag=bound.flag) from error
    return value


def _load(given: Overrides) -> None:
    folder = given.pop("folder", None)
    run_load(None if folder is None else str(folder), given)


_FOLDER = argument("folder", "FOLDER", "Folder of the files to send.")
commands = typer.Typer(add_completion=False)
commands.command("load", epilog=EPILOG)(
    command(
        [*load_options(), *options_of(LoadConfig)],
        _load,
        "Load a model into a service without one, from FOLDER here or from --path there.",
        first=[_FOLDER],
    )
)
commands.command("unload", epilog=EPILOG)(
    command(options_of(UnloadConfig), run_unload, "Unload the model of a service, and free its memory.")
)
commands.command("info")(command(options_of(ModelsConfig), run_info, "Show a service's model, if it has one."))
