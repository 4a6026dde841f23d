"""Commands `penstock adapters list | load | unload`: LoRA adapters of a running generation service."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import typer

from penstock.cli.client.connection import GROUP as CONNECTION
from penstock.cli.client.connection import ConnectionConfig, open_operator_client
from penstock.cli.console import console, say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.common.options import option, options_of

EPILOG = f"""Only folders below the service's --adapter-root can be loaded. A router asks the backend that
--backend names, and takes the tokens of its --admin-token-file (--token-file here).
docs/guide/adapters.md explains it.

{ENV_NOTE}

Examples:

  penstock adapters list

  penstock adapters load support ./support-v2 --replace

  penstock adapters load support --backend 10.0.0.7:50052

  penstock adapters unload support"""

GROUP = "Adapters"


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig(ConnectionConfig):
    """Configuration: a router or a generation service, and the backend that a router asks."""

    # The plain name is the router's own variable.
    backend: str | None = option(
        None,
        "Backend for the router to ask, if it has several: its address, or its name in the router's own --backend.",
        group=CONNECTION,
        env="PENSTOCK_ADAPTERS_BACKEND",
        metavar="NAME_OR_ADDRESS",
    )


@dataclass(frozen=True, kw_only=True)
class ListAdaptersConfig(AdaptersConfig):
    """Configuration of the list."""

    json: bool = option(False, "Write it as JSON.", group=GROUP, env="PENSTOCK_ADAPTERS_JSON")


@dataclass(frozen=True, kw_only=True)
class LoadAdapterConfig(AdaptersConfig):
    """Configuration of a load."""

    replace: bool = option(
        False,
        "Give a known name the new adapter; requests that run finish with the old one.",
        group=GROUP,
        env="PENSTOCK_ADAPTERS_REPLACE",
    )
    timeout_seconds: float = option(
        300.0,
        "Time for the service to read it.",
        group=GROUP,
        flag="--timeout",
        env="PENSTOCK_ADAPTERS_TIMEOUT",
        minimum=0.1,
    )


def run_list(given: Overrides) -> None:
    """Show the adapters. Raises PenstockError, StartupError."""
    config: ListAdaptersConfig = _config(ListAdaptersConfig, given)
    with open_operator_client(config, config.backend) as client:
        found = client.list_adapters(backend=config.backend or "")
    if config.json:
        import json

        from google.protobuf import json_format

        shown = [_with_numbers(json_format.MessageToDict(one, **_WHOLE)) for one in found]
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return
    if not found:
        say("no adapters")
        return
    _show(found)


# All fields, by their names in the protos.
_WHOLE: Any = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}


def _with_numbers(adapter: dict[str, Any]) -> dict[str, Any]:
    """Turn texts into numbers: JSON of protobuf has 64-bit integers as text."""
    return {**adapter, "bytes": int(adapter["bytes"])}


def _show(found: list[Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from penstock.common.units import format_size

    table = Table("adapter", "folder", "rank", "modules", "memory", "loaded", "requests")
    for one in found:
        table.add_row(
            escape(one.name),
            escape(one.path),
            str(one.rank),
            " ".join(one.target_modules),
            format_size(one.bytes),
            "yes" if one.loaded else "when used",
            str(one.live_requests),
        )
    console().print(table)


def run_load(name: str, path: str, given: Overrides) -> None:
    """Load an adapter. Raises PenstockError, StartupError."""
    config: LoadAdapterConfig = _config(LoadAdapterConfig, given)
    with open_operator_client(config, config.backend) as client:
        adapter = client.load_adapter(
            name, path, replace=config.replace, backend=config.backend or "", timeout=config.timeout_seconds
        )
    say(f"{adapter.name}: loaded, rank {adapter.rank}, {' '.join(adapter.target_modules)}")


def run_unload(name: str, given: Overrides) -> None:
    """Unload an adapter. Raises PenstockError, StartupError."""
    config: AdaptersConfig = _config(AdaptersConfig, given)
    with open_operator_client(config, config.backend) as client:
        live = client.unload_adapter(name, backend=config.backend or "")
    say(f"{name}: unloaded" + (f"; {live} requests still use it" if live else ""))


def _config(kind: Any, given: Overrides) -> Any:
    from penstock.common.config import from_env_and_flags  # brings grpc, which --help must not wait for

    return from_env_and_flags(kind, given)


def _load(given: Overrides) -> None:
    run_load(str(given.pop("name")), str(given.pop("path", "")), given)


def _unload(given: Overrides) -> None:
    run_unload(str(given.pop("name")), given)


_NAME = argument("name", "NAME", "Name by which requests ask for it.", default=...)
_PATH = argument("path", "FOLDER", "PEFT folder below the service's --adapter-root; by default the one of that name.")
commands = typer.Typer(no_args_is_help=True, add_completion=False, epilog=EPILOG)
commands.command("list")(command(options_of(ListAdaptersConfig), run_list, "Show the adapters that requests may name."))
commands.command("load")(
    command(
        options_of(LoadAdapterConfig), _load, "Load an adapter, beside the requests that run.", first=[_NAME, _PATH]
    )
)
commands.command("unload")(
    command(
        options_of(AdaptersConfig),
        _unload,
        "Forget an adapter: requests that have it go on to their end.",
        first=[_NAME],
    )
)
