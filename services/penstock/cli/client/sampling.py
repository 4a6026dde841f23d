"""Generation options of `chat` and `complete`: flags for the most useful ones, and --option for every other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.common.options import option, options_of
from penstock.generation.options.table import GENERATION, SECTIONS

if TYPE_CHECKING:
    from penstock_client import GenerationOptions

    from penstock.generation.options.option_spec import OptionSpec

STRUCTURE = "Structured output"
# The option's name in penstock_client's errors.
_OPTION_NAME = re.compile(r"options? '(\w+)'")


def _text_or_file(text: str) -> str:
    """Return `text`, or for `@path` the file's text. Raises ValueError for a file that cannot be read."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise ValueError("the file cannot be read as UTF-8 text") from None


def _name_and_value(text: str) -> tuple[tuple[str, Any], ...]:
    """Parse `NAME=JSON`. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError("expected NAME=JSON")
    try:
        return ((name, json.loads(value)),)
    except ValueError:
        raise ValueError("expected JSON after the =") from None


def _layers(text: str) -> str | tuple[int, ...]:
    """Parse `low`, `high`, or numbers separated by commas. Raises ValueError."""
    if text in ("low", "high"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("expected low, high or numbers") from None


def _early_stopping(text: str) -> bool | str:
    """Parse `true`, `false` or `never`. Raises ValueError."""
    known: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in known:
        raise ValueError("expected true, false or never")
    return known[text]


def _flag(spec: OptionSpec) -> tuple[str, Any, Any]:
    """A field of a configuration for a row of the table of options: name, type and option."""
    kind, bounds = spec.kind, spec.bounds
    low = None if bounds is None or bounds.above else bounds.low
    parse, metavar = _FORMS.get(kind.form, (None, None))
    field = option(None, spec.doc, group=spec.flags, minimum=low, parse=parse, metavar=metavar)
    return spec.oneof or spec.name, kind.type | None, field


# Form in the table of options -> the parser of its text, and its placeholder in help texts.
_FORMS: dict[str, tuple[Callable[[str], object], str | None]] = {
    "early_stopping": (_early_stopping, "true|false|never"),
    "layers": (_layers, "low|high|LIST"),
    # Here "none" is a text like any other.
    "prompt": (str, None),
}


def flags_of_the_table() -> list[tuple[str, Any, Any]]:
    """Return fields for the rows with a flag of their own: name, type and option."""
    return [_flag(spec) for specs in SECTIONS.values() for spec in specs.values() if spec.flags]


_OptionFlags: Any = make_dataclass("_OptionFlags", flags_of_the_table(), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(_OptionFlags):  # type: ignore[misc]  # its fields are the table's
    """Options of a request; the model's defaults hold for those left out."""

    model: str | None = option(
        None,
        "Model to use; when left out, the only one served.",
        group=GENERATION,
        flag="--model",
        env="PENSTOCK_CHAT_MODEL",
    )
    adapter: str | None = option(
        None,
        "LoRA adapter of the model; naming it in --model does the same.",
        group=GENERATION,
        env="PENSTOCK_CHAT_ADAPTER",
        metavar="NAME",
    )
    stop: tuple[str, ...] = option(
        (), "Stop before this text (repeatable).", group=GENERATION, metavar="TEXT", parse=lambda text: (text,)
    )
    others: tuple[tuple[str, Any], ...] = option(
        (),
        "Any other option that the Python client has (repeatable).",
        group=GENERATION,
        flag="--option",
        metavar="NAME=JSON",
        parse=_name_and_value,
    )
    stats: bool = option(False, "Show token counts, timings and warnings.", group=GENERATION)
    json_schema: str | None = option(
        None, "JSON of this schema; @FILE reads it.", group=STRUCTURE, metavar="JSON|@FILE", parse=_text_or_file
    )
    json_object: bool | None = option(None, "Any JSON object.", group=STRUCTURE)
    regex: str | None = option(None, "Text that matches this expression.", group=STRUCTURE, parse=str)
    grammar: str | None = option(
        None, "Text of this Lark grammar; @FILE reads it.", group=STRUCTURE, metavar="LARK|@FILE", parse=_text_or_file
    )
    choice: tuple[str, ...] = option(
        (), "One of these texts (repeatable).", group=STRUCTURE, metavar="TEXT", parse=lambda text: (text,)
    )

    def request_options(self) -> GenerationOptions:
        """Make penstock_client's keyword options of those that are set. Raises StartupError for a bad --option."""
        apart = {"stop", "stats", "others", "choice"}
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        given: dict[str, Any] = {name: value for name, value in plain.items() if value is not None}
        for name, texts in (("stop_strings", self.stop), ("choice", self.choice)):
            if texts:
                given[name] = list(texts)
        given.update(self.others)
        by_flag = {bound.name: bound.flag for bound in options_of(type(self))}
        by_flag["stop_strings"] = by_flag["stop"]
        _check(given, {name: flag for name, flag in by_flag.items() if name not in dict(self.others)})
        return cast("GenerationOptions", given)


def _check(given: dict[str, Any], flags: Mapping[str, str]) -> None:
    """Check options before the call: an option that the client refuses is a wrong flag. `flags`: option -> its flag.

    Raises StartupError.
    """
    from penstock_client import check_options

    from penstock.common.errors import StartupError  # imports grpc, which --help must not wait for

    try:
        check_options(**given)
    except (TypeError, ValueError) as error:
        named = _OPTION_NAME.search(str(error))
        raise StartupError(str(error), flag=flags.get(named[1] if named else "", "--option")) from error
