"""Commands of `penstock serve`, made from the services' configurations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.flags import ENV_NOTE, command
from penstock.cli.serve.service_process import EVERYTHING, PARENT_OPTIONS, ROLES, Role, run_role
from penstock.cli.serve.tree import run_tree, tree_options
from penstock.common.options import BoundOption, options_of

EPILOG = f"""{ENV_NOTE}

Examples:

  penstock serve --kv-memory 1GiB

  penstock serve Qwen/Qwen2.5-0.5B-Instruct --port 6000

  penstock serve ./my-model --generation-replicas 2

  penstock serve router --tokenizer tok:50051 --backend gen:50052"""


class ServeGroup(TyperGroup):
    """Group of serve: a first word that names no service is the MODEL of the tree."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [EVERYTHING, *args]
        return super().parse_args(ctx, args)


class TreeCommand(TyperCommand):
    """Command of the whole tree, shown without the name that ServeGroup inserts."""

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace(f" {EVERYTHING} ", " ")


commands = typer.Typer(cls=ServeGroup, add_completion=False)


def _parent_parameters() -> list[inspect.Parameter]:
    """Options that describe the parent to a child of the tree: flags only, since children inherit variables."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=typer.Option(None, hidden=True), annotation=int | None)
        for name in PARENT_OPTIONS
    ]


def _add(name: str, options: Iterable[BoundOption], run: Callable[..., int], doc: str, **settings: Any) -> None:
    def invoke(given: dict[str, object]) -> None:
        sys.exit(run(given, **{name: given.pop(name, None) for name in PARENT_OPTIONS}))

    commands.command(name, **settings)(command(options, invoke, doc, first=_parent_parameters()))


def _add_role(role: Role, doc: str) -> None:
    def run(given: dict[str, object], **process: Any) -> int:
        return run_role(role, given, **process)

    _add(role.name, options_of(role.config_class()), run, doc, epilog=ENV_NOTE)


_add(
    EVERYTHING,
    tree_options(),
    run_tree,
    "Serve MODEL with tokenizer, generation, router and HTTP gateway in one process tree.\n\n"
    "MODEL is a folder or a Hugging Face hub id; the embedded demo model when left out. "
    "One service alone: penstock serve tokenizer | generation | router | gateway.",
    cls=TreeCommand,
    hidden=True,
    epilog=EPILOG,
)
_add_role(ROLES["tokenizer"], "Text to ids and back, and chat templates. Needs no torch.")
_add_role(ROLES["generation"], "The model: token ids in, token ids out.")
_add_role(ROLES["router"], "The public service: text in, text out, over any number of backends.")
_add_role(ROLES["gateway"], "OpenAI's HTTP API in front of a router. Needs no torch.")
