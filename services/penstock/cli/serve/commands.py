"""Commands of `penstock serve`, made from the services' configurations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.console import say
from penstock.cli.flags import ENV_NOTE, command
from penstock.cli.serve.service_process import EVERYTHING, PARENT_OPTIONS, ROLES, Role, run_role
from penstock.cli.serve.tree import run_tree, tree_options
from penstock.common.options import BoundOption, options_of

EPILOG = f"""{ENV_NOTE}

Examples:

  penstock serve --kv-memory 1GiB

  penstock serve Qwen/Qwen2.5-0.5B-Instruct --port 6000

  penstock serve smollm2

  penstock serve ./my-model --generation-replicas 2

  penstock serve router --tokenizer tok:50051 --backend gen:50052"""


# Options that people need first, by the command: their help lists these alone.
_NETWORK = frozenset({"host", "port", "metrics_port", "auth_token_file", "tls_cert", "tls_key"})
_MODEL = frozenset(
    {
        *("model", "served_model_name", "device", "dtype", "quantization", "threads"),
        *("kv_memory", "max_context", "max_running_sequences"),
    }
)
FIRST: Mapping[str, frozenset[str]] = {
    EVERYTHING: _MODEL | {"generation_replicas", "models", "host", "port", "http_port", "auth_token_file"},
    "tokenizer": _NETWORK | {"model", "served_model_name", "processes", "workers"},
    "generation": _NETWORK | _MODEL | {"lora"},
    "router": _NETWORK | {"tokenizer", "backend", "processes", "max_live_requests", "insecure_bind"},
    "gateway": (_NETWORK - {"metrics_port", "auth_token_file"}) | {"router", "allowed_origin", "channel_token_file"},
}


class ServeGroup(TyperGroup):
    """Group of serve: a first word that names no service is the MODEL of the tree."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [EVERYTHING, *args]
        return super().parse_args(ctx, args)


class BriefCommand(TyperCommand):
    """Command with a short help of the options that people need first; --help-all shows every option."""

    shows_all = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        listed = FIRST[str(self.name)] | {"help", "help_all"}
        others = [one for one in self.get_params(ctx) if one.name not in listed and not getattr(one, "hidden", False)]
        hidden: list[Any] = [] if self.shows_all else others
        try:
            for one in hidden:
                one.hidden = True
            super().format_help(ctx, formatter)
        finally:
            for one in hidden:
                one.hidden = False


class TreeCommand(BriefCommand):
    """Command of the whole tree, shown without the name that ServeGroup inserts."""

    def get_usage(self, ctx: Any) -> str:
        """Return the line of usage."""
        return super().get_usage(ctx).replace(f" {EVERYTHING} ", " ")


commands = typer.Typer(cls=ServeGroup, add_completion=False)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and isinstance(ctx.command, BriefCommand):
        ctx.command.shows_all = True
        # With rich it writes the help itself, and returns nothing.
        if text := ctx.get_help():
            say(text)
        raise typer.Exit


def _help_all(options: int) -> inspect.Parameter:
    """Make the flag --help-all of a command with a number of options."""
    shown = typer.Option(
        False, "--help-all", is_eager=True, callback=_show_all, help=f"Show all {options} options and exit."
    )
    return inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=bool)


def _parent_parameters() -> list[inspect.Parameter]:
    """Options that describe the parent to a child of the tree: flags only, since children inherit variables."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=typer.Option(None, hidden=True), annotation=int | None)
        for name in PARENT_OPTIONS
    ]


def _add(name: str, options: Iterable[BoundOption], run: Callable[..., int], doc: str, **settings: Any) -> None:
    options = list(options)

    def invoke(given: dict[str, object]) -> None:
        given.pop("help_all", None)
        sys.exit(run(given, **{name: given.pop(name, None) for name in PARENT_OPTIONS}))

    commands.command(name, **settings)(
        command(options, invoke, doc, first=[*_parent_parameters(), _help_all(len(options))])
    )


def _add_role(role: Role, doc: str) -> None:
    def run(given: dict[str, object], **process: Any) -> int:
        return run_role(role, given, **process)

    _add(role.name, options_of(role.config_class()), run, doc, epilog=ENV_NOTE, cls=BriefCommand)


_add(
    EVERYTHING,
    tree_options(),
    run_tree,
    "Serve MODEL with tokenizer, generation, router and HTTP gateway in one process tree.\n\n"
    "MODEL is a folder, a GGUF file, a Hugging Face hub id or a short name; the embedded demo model when left out. "
    "One service alone: penstock serve tokenizer | generation | router | gateway.",
    cls=TreeCommand,
    hidden=True,
    epilog=EPILOG,
)
_add_role(ROLES["tokenizer"], "Text to ids and back, and chat templates. Needs no torch.")
_add_role(ROLES["generation"], "The model: token ids in, token ids out.")
_add_role(ROLES["router"], "The public service: text in, text out, over any number of backends.")
_add_role(ROLES["gateway"], "OpenAI's HTTP API in front of a router. Needs no torch.")
