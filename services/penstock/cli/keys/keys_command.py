"""Commands `penstock keys add | revoke | list | usage`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.client.connection import ConnectionConfig, open_operator_client
from penstock.cli.console import console, say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.common.options import option, options_of

if TYPE_CHECKING:
    from penstock.v1 import router_pb2

EPILOG = f"""`add` writes a file, which the router reads again by itself, and prints the secret: nobody can read it
later. `revoke` with --keys-file changes the file; without, it asks a router, which takes the tokens of its
--admin-token-file, or a key with the scope admin (--token-file here).
docs/guide/keys.md explains it.

{ENV_NOTE}

Examples:

  penstock keys add search --keys-file keys.toml --tokens-per-day 1000000

  penstock keys add ci --keys-file keys.toml --models smollm2 --requests-per-minute 60 --expires 2027-01-01

  penstock keys list

  penstock keys usage --days 30

  penstock keys revoke search                             at once, at all routers that share the ledger

  penstock keys revoke search --keys-file keys.toml       in the file"""

GROUP, BOUNDS = "Keys", "Bounds of the key"


def _keys_file(default: str | None) -> Any:
    # The plain name is the router's own variable.
    return option(default, "File of keys (TOML).", group=GROUP, env="PENSTOCK_KEYS_COMMAND_FILE", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class AddKeyConfig:
    """Configuration of a new key."""

    keys_file: str = _keys_file("keys.toml")
    tenant: str | None = option(
        None,
        "Keys of one tenant share prefixes and turns; by default the key's own label.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_TENANT",
    )
    scopes: tuple[str, ...] = option(
        ("generate", "embed"),
        "Calls that it may make: generate, embed, jobs, admin, model, metrics, delegate.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_SCOPES",
    )
    models: tuple[str, ...] = option(
        (), "Models that it may use; by default all.", group=BOUNDS, env="PENSTOCK_KEYS_MODELS"
    )
    adapters: tuple[str, ...] = option(
        (), "Adapters that it may use; by default all.", group=BOUNDS, env="PENSTOCK_KEYS_ADAPTERS"
    )
    requests_per_minute: int | None = option(
        None,
        "Requests a minute, at each router process.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_REQUESTS_PER_MINUTE",
        minimum=1,
    )
    tokens_per_minute: int | None = option(
        None,
        "Tokens a minute, of prompts and answers, at each router process.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_TOKENS_PER_MINUTE",
        minimum=1,
    )
    concurrent_requests: int | None = option(
        None,
        "Requests at once, at each router process.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_CONCURRENT_REQUESTS",
        minimum=1,
    )
    tokens_per_day: int | None = option(
        None,
        "Tokens a day (UTC), of prompts and answers, at all routers that share a ledger.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_TOKENS_PER_DAY",
        minimum=1,
    )
    expires: str | None = option(
        None,
        "Time from which it is refused: 2027-01-01, or 2027-01-01T12:00:00Z.",
        group=BOUNDS,
        env="PENSTOCK_KEYS_EXPIRES",
        metavar="TIME",
    )


@dataclass(frozen=True, kw_only=True)
class RevokeKeyConfig(ConnectionConfig):
    """Configuration of a revocation."""

    keys_file: str | None = _keys_file(None)


@dataclass(frozen=True, kw_only=True)
class ListKeysConfig(ConnectionConfig):
    """Configuration of the list."""

    json: bool = option(False, "Write it as JSON.", group=GROUP, env="PENSTOCK_KEYS_JSON")


@dataclass(frozen=True, kw_only=True)
class KeyUsageConfig(ListKeysConfig):
    """Configuration of the use of keys."""

    days: int = option(
        1, "Days, today among them (UTC).", group=GROUP, env="PENSTOCK_KEYS_DAYS", minimum=1, maximum=366
    )


def run_add(given: Overrides) -> None:
    """Write a key with a new secret into a file, and print the secret. Raises StartupError."""
    from penstock.cli.keys.file_edit import Value, add_key, new_secret

    label = str(given.pop("label"))
    config: AddKeyConfig = _config(AddKeyConfig, given)
    fields: dict[str, Value] = {"label": label, "scopes": config.scopes}
    if config.tenant is not None:
        fields["tenant"] = config.tenant
    for name in ("models", "adapters"):
        if names := getattr(config, name):
            fields[name] = names
    for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day"):
        if (bound := getattr(config, name)) is not None:
            fields[name] = bound
    if config.expires is not None:
        fields["expires"] = _time(config.expires)
    secret = new_secret()
    add_key(config.keys_file, fields, secret)
    say(secret)


def _time(text: str) -> str:
    """Return a time as the file has it. Raises StartupError naming --expires."""
    from penstock.common.errors import StartupError

    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise StartupError(
            "--expires must be a time such as 2027-01-01T12:00:00Z, or a date", flag="--expires"
        ) from None
    return text


def run_revoke(given: Overrides) -> None:
    """Revoke a key, in a file or at a router. Raises PenstockError, StartupError."""
    label = str(given.pop("label"))
    config: RevokeKeyConfig = _config(RevokeKeyConfig, given)
    if config.keys_file is not None:
        from penstock.cli.keys.file_edit import revoke_key

        revoke_key(config.keys_file, label)
    else:
        with open_operator_client(config, None) as client:
            client.revoke_key(label)
    say(f"{label}: revoked")


def run_list(given: Overrides) -> None:
    """Show the keys of a router. Raises PenstockError, StartupError."""
    config: ListKeysConfig = _config(ListKeysConfig, given)
    with open_operator_client(config, None) as client:
        found = client.list_keys()
    if config.json:
        _write_json(found)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("key", "scopes", "models", "quotas", "state")
    for key in found:
        name = key.label if key.tenant == key.label else f"{key.label} of {key.tenant}"
        models = "all" if key.all_models else "\n".join(key.models) or "none"
        table.add_row(escape(name), "\n".join(key.scopes), escape(models), _quotas(key), _state(key))
    console().print(table)


def _quotas(key: router_pb2.KeyFacts) -> str:
    quotas = {
        "requests a minute": key.requests_per_minute,
        "tokens a minute": key.tokens_per_minute,
        "requests at once": key.concurrent_requests,
        "tokens a day": key.tokens_per_day,
    }
    # None is 0.
    return "\n".join(f"{quota:,} {name}" for name, quota in quotas.items() if quota) or "none"


def _state(key: router_pb2.KeyFacts) -> str:
    if key.revoked:
        return "revoked"
    if not key.HasField("expires"):
        return "valid"
    expires = datetime.fromtimestamp(key.expires, UTC)
    return "expired" if expires <= datetime.now(UTC) else f"until {expires:%Y-%m-%d %H:%M}"


def run_usage(given: Overrides) -> None:
    """Show what keys used, by day. Raises PenstockError, StartupError."""
    config: KeyUsageConfig = _config(KeyUsageConfig, given)
    with open_operator_client(config, None) as client:
        found = client.list_keys(days=config.days)
    if config.json:
        _write_json(found)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("key", "answers", "tokens", "lost", "of the quota")
    for key in found:
        for day in key.usage:
            when = date(1970, 1, 1) + timedelta(days=day.day)
            used = day.prompt_tokens + day.completion_tokens + day.lost_tokens
            tokens = [f"{day.prompt_tokens:,} prompt", f"{day.completion_tokens:,} completion"]
            if day.reserved_tokens:
                tokens.append(f"{day.reserved_tokens:,} reserved")
            table.add_row(
                f"{escape(key.label)}\n{when}",
                f"{day.answers:,}",
                "\n".join(tokens),
                f"{day.lost_answers:,}\n{day.lost_tokens:,} tokens" if day.lost_answers else "0",
                f"{used / key.tokens_per_day:.1%}" if key.tokens_per_day else "–",
            )
    console().print(table)


def _write_json(found: list[router_pb2.KeyFacts]) -> None:
    import json

    from google.protobuf import json_format

    shown = [json_format.MessageToDict(key, preserving_proto_field_name=True) for key in found]
    sys.stdout.write(json.dumps(shown, indent=2) + "\n")


def _config(kind: Any, given: Overrides) -> Any:
    from penstock.common.config import from_env_and_flags  # brings grpc, which --help must not wait for

    return from_env_and_flags(kind, given)


_LABEL = argument("label", "LABEL", "Name of the key, in metrics and in the ledger.", default=...)
commands = typer.Typer(no_args_is_help=True, add_completion=False, epilog=EPILOG)
commands.command("add")(
    command(
        options_of(AddKeyConfig), run_add, "Write a new key into a file, and print its secret once.", first=[_LABEL]
    )
)
commands.command("revoke")(
    command(
        options_of(RevokeKeyConfig), run_revoke, "Refuse a key from now on, at routers or in a file.", first=[_LABEL]
    )
)
commands.command("list")(command(options_of(ListKeysConfig), run_list, "Show the keys of a router, without secrets."))
commands.command("usage")(command(options_of(KeyUsageConfig), run_usage, "Show what each key used, by day."))
