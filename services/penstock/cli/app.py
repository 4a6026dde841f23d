"""The command line `penstock`: one group; each command is imported when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock import __version__
from penstock.cli.command_table import COMMANDS, CommandRow
from penstock.cli.console import say
from penstock.cli.foreign_flags import COMMAND_HINTS, SAME_COMMANDS
from penstock.cli.usage_errors import UsageError

EPILOG = """Examples:

  penstock serve                     the embedded model on 127.0.0.1:50050

  penstock chat                      talk to it

  penstock complete "1 + 1 ="        complete a text

  penstock infer --data-file FILE    answer a file of prompts, without a server

  penstock bench --concurrency 16    put load on it

  penstock health                    is it ready?"""


class LazyCommand(TyperCommand):
    """A row of the table in help texts; once it is called, the command or group that its module has."""

    def __init__(self, row: CommandRow) -> None:
        super().__init__(row.name, callback=None, help=row.help, rich_help_panel=row.group)
        self._row = row

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, _, name = self._row.target.partition(":")
        command = typer.main.get_command(getattr(import_module(f"penstock.cli.{module}"), name))
        command.help = command.help or self._row.help
        return command.make_context(info_name, args, parent, **extra)


class CommandGroup(TyperGroup):
    """The commands of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {row.name: LazyCommand(row) for row in COMMANDS}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Also take names that other programs have for our commands; tell what does the work of others."""
        name, *rest = args
        if name in self.commands:
            return super().resolve_command(ctx, args)
        if name == "version":
            _version(True)
        if name == "help":
            # `penstock help serve`; the help of all when nothing follows.
            args = [*rest, "--help"]
            if not rest:
                say(ctx.get_help())
                raise typer.Exit
        elif name in SAME_COMMANDS:
            args = [SAME_COMMANDS[name], *rest]
        elif name in COMMAND_HINTS:
            raise UsageError(f"no command {name!r}: {COMMAND_HINTS[name]}", ctx)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    help="Hugging Face's generate(), continuously batched, behind gRPC services.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks on errors.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself."""
