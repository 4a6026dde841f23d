"""Command-line options made from configuration classes, so that a default, a help text and a flag have one home."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import typer
from rich.markup import escape

from penstock.common.options import MODEL_ARGUMENT, BoundOption

ENV_NOTE = "Every option can also be set by an environment variable: --kv-memory is PENSTOCK_KV_MEMORY."
Overrides = dict[str, object]


def command(
    options: Iterable[BoundOption],
    run: Callable[[Overrides], None],
    doc: str = "",
    *,
    first: Iterable[inspect.Parameter] = (),
) -> Callable[..., None]:
    """Make a function for `typer.Typer.command` with one parameter per option, after those of `first`.

    `doc` is its help text, by default the one line of the table of commands. It calls `run` with the values on the
    command line, as text, by field name; options that repeat come as lists. The configuration parses and checks them
    (`from_env_and_flags`), so a flag and its variable are treated alike.
    """
    chosen = list(options)
    parameters = [*first, *(parameter for option in chosen for parameter in _parameters(option))]

    def invoke(**given: Any) -> None:
        if given.get("model_flag") is not None:
            given["model"] = given["model_flag"]
        given.pop("model_flag", None)
        run({name: value for name, value in given.items() if value is not None and value != []})

    function: Any = invoke
    function.__doc__ = doc or None
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return invoke


def argument(name: str, metavar: str, help: str, *, default: Any = None) -> inspect.Parameter:
    """Make a text without a flag, for `first` of `command`; a `default` of ... says that it must be given."""
    made = typer.Argument(default, metavar=metavar, help=help, show_default=False)
    annotation = str if default is ... else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=annotation)


def _parameters(option: BoundOption) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    if option.flag == MODEL_ARGUMENT:
        argument = typer.Argument(None, metavar="MODEL", help=escape(option.settings.help), show_default=False)
        alias = typer.Option(None, "--model", hidden=True)
        return [
            inspect.Parameter("model", keyword, default=argument, annotation=str | None),
            inspect.Parameter("model_flag", keyword, default=alias, annotation=str | None),
        ]
    return [inspect.Parameter(option.name, keyword, default=_option(option), annotation=_annotation(option))]


def _option(option: BoundOption) -> Any:
    names = (option.flag,) if option.negative_flag is None else (option.flag, option.negative_flag)
    if option.is_bool:
        names = ("/".join(names),)
    return typer.Option(
        None,
        *names,
        help=_help(option),
        metavar=None if option.is_bool else option.metavar,
        show_default=False,
        rich_help_panel=option.settings.group,
        hidden=option.settings.hidden,
    )


def as_flags(option: BoundOption, value: Any) -> list[str]:
    """Make arguments of another command from a value of this one."""
    if option.is_bool:
        # The default is passed as well: the other command may have a variable with another value.
        return [option.flag] if value is True else [option.negative_flag] if option.negative_flag else []
    flag = "--model" if option.flag == MODEL_ARGUMENT else option.flag
    return [part for one in (value if isinstance(value, list) else [value]) for part in (flag, str(one))]


def _help(option: BoundOption) -> str:
    default = shown_default(option)
    return escape(f"{option.settings.help} [default: {default}]" if default else option.settings.help)


def _annotation(option: BoundOption) -> Any:
    if option.is_bool:
        return bool | None
    return list[str] | None if option.is_list else str | None


def shown_default(option: BoundOption) -> str:
    """Return the default as the command line spells it; empty when there is none."""
    default = option.default
    if default is None and option.metavar.endswith("|auto"):
        return "auto"
    if default is None or default is False or default == ():
        return ""
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if option.name.endswith("_bytes") and isinstance(default, int):
        return _shown_size(default)
    if option.name.endswith("_seconds"):
        return f"{default:g}s"
    return str(default)


def _shown_size(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def fold_long_flags() -> None:
    """Fold flags that are wider than their column in this process's help texts: typer would cut them."""
    # Modules that only a help text needs.
    from rich.text import Text
    from typer import rich_utils

    class Folding(rich_utils.OptionHighlighter):
        def highlight(self, text: Text) -> None:
            super().highlight(text)
            text.overflow = "fold"

    class FoldingNegative(rich_utils.NegativeOptionHighlighter):
        def highlight(self, text: Text) -> None:
            super().highlight(text)
            text.overflow = "fold"

    rich_utils.highlighter = Folding()
    rich_utils.negative_highlighter = FoldingNegative()
