"""Generation options of `chat` and `complete`: flags for the most useful ones, and --option for every other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.common.options import option, options_of

if TYPE_CHECKING:
    from penstock_client import GenerationOptions

GROUP, SEARCH, DRAFTS = "Generation", "Beams and other searches", "Drafts"
GUIDANCE, STRUCTURE = "Guidance", "Structured output"
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
    """Parse `low`, `high`, or numbers with commas between. Raises ValueError."""
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


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of a request; for those left out the model's own defaults hold."""

    model: str | None = option(
        None, "Model to use; the only one served when left out.", group=GROUP, flag="--model", env="PENSTOCK_CHAT_MODEL"
    )
    max_new_tokens: int | None = option(None, "Longest answer.", group=GROUP, minimum=1)
    min_new_tokens: int | None = option(None, "Shortest answer.", group=GROUP, minimum=0)
    do_sample: bool | None = option(None, "Sample; most chat models' own files say so too.", group=GROUP)
    temperature: float | None = option(None, "0 is greedy.", group=GROUP, minimum=0)
    top_k: int | None = option(None, "Sample among the k likeliest tokens; 0 is off.", group=GROUP, minimum=0)
    top_p: float | None = option(None, "Sample among the likeliest tokens of this probability.", group=GROUP)
    min_p: float | None = option(None, "Drop tokens less likely than this share of the likeliest.", group=GROUP)
    repetition_penalty: float | None = option(None, "Above 1: say less again.", group=GROUP)
    no_repeat_ngram_size: int | None = option(None, "No run of so many tokens comes twice.", group=GROUP, minimum=0)
    seed: int | None = option(None, "Same seed, same answer.", group=GROUP, minimum=0)
    stop: tuple[str, ...] = option(
        (), "Stop before this text (repeatable).", group=GROUP, metavar="TEXT", parse=lambda text: (text,)
    )
    others: tuple[tuple[str, Any], ...] = option(
        (),
        "Any other option of the Python client (repeatable).",
        group=GROUP,
        flag="--option",
        metavar="NAME=JSON",
        parse=_name_and_value,
    )
    stats: bool = option(False, "Show token counts, timings and warnings.", group=GROUP)
    num_beams: int | None = option(None, "Beam search with so many beams.", group=SEARCH, minimum=1)
    length_penalty: float | None = option(None, "Beams: above 0 prefers long answers.", group=SEARCH)
    early_stopping: str | bool | None = option(
        None, "Beams: when to stop.", group=SEARCH, metavar="true|false|never", parse=_early_stopping
    )
    num_beam_groups: int | None = option(None, "Diverse beam search with so many groups.", group=SEARCH, minimum=1)
    diversity_penalty: float | None = option(None, "How much groups shall differ.", group=SEARCH, minimum=0)
    penalty_alpha: float | None = option(None, "Contrastive search, among --top-k candidates.", group=SEARCH, minimum=0)
    dola_layers: str | tuple[int, ...] | None = option(
        None, "DoLa: low, high or layer numbers.", group=SEARCH, metavar="low|high|LIST", parse=_layers
    )
    prompt_lookup_num_tokens: int | None = option(
        None, "Draft so many tokens from the prompt's own n-grams; 0 is off.", group=DRAFTS, minimum=0
    )
    assistant_model: str | None = option(None, "Name of the server's draft model.", group=DRAFTS)
    num_assistant_tokens: int | None = option(None, "Tokens that it drafts at once.", group=DRAFTS, minimum=1)
    guidance_scale: float | None = option(None, "Above 1: keep closer to the prompt.", group=GUIDANCE)
    negative_prompt: str | None = option(None, "What to steer away from.", group=GUIDANCE, parse=str)
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
        """Make penstock_client's keyword options from those that are set. Raises StartupError for a bad --option."""
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
    """Check options before the call: one that the client refuses is a wrong flag. `flags`: option -> its flag.

    Raises StartupError.
    """
    from penstock_client import check_options

    from penstock.common.errors import StartupError  # imports grpc, which --help must not wait for

    try:
        check_options(**given)
    except (TypeError, ValueError) as error:
        named = _OPTION_NAME.search(str(error))
        raise StartupError(str(error), flag=flags.get(named[1] if named else "", "--option")) from error
