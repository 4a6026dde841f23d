"""Reads a checkpoint's generation_config.json into defaults; settings without effect are reported, never dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.common.errors import InvalidArgument, StartupError
from penstock.common.hf_fields import FACTS, WITHOUT_EFFECT
from penstock.generation.options.checks import check_ids, check_options, check_possible
from penstock.generation.options.kinds import BadValue
from penstock.generation.options.mode_options import resolve_modes
from penstock.generation.options.request_limits import DEFAULT_LIMITS
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.options.table import CONFIG, RequestOptions

FILE_NAME = "generation_config.json"
# Facts about the file, the model or transformers' own caches: they do not affect the output here.
IRRELEVANT_FIELDS = FACTS | WITHOUT_EFFECT.keys()
_SPECIAL = frozenset({"eos_token_id", "bos_token_id", "pad_token_id", "stop_strings"})


class LoadedDefaults(NamedTuple):
    """Defaults, and the names of settings in the file that this release does not honour."""

    defaults: ModelDefaults
    ignored: tuple[str, ...]


def load_defaults(
    folder: Path, model_eos_token_ids: tuple[int, ...], vocab_size: int, num_layers: int = 1
) -> LoadedDefaults:
    """Read `folder`/generation_config.json, which may be absent.

    `model_eos_token_ids` (from config.json) count when the file names none. Raises StartupError naming the field.
    """
    values = _read(folder / FILE_NAME)
    ids, sequences = _eos(values.get("eos_token_id"))
    if values.get("eos_token_id") is None:
        sequences = _model_runs(folder)
    try:
        options = options_of(values)
    except BadValue as error:
        raise _broken(str(error)) from error
    defaults = ModelDefaults(
        options=options,
        eos_token_ids=ids if values.get("eos_token_id") is not None else model_eos_token_ids,
        eos_sequences=sequences,
        stop_strings=_strings(values.get("stop_strings")),
        bos_token_id=_special_id(values.get("bos_token_id"), "bos_token_id"),
        pad_token_id=_special_id(values.get("pad_token_id"), "pad_token_id"),
    )
    _check(defaults, vocab_size, num_layers)
    return LoadedDefaults(defaults, tuple(sorted(_ignored(values))))


def options_of(values: Mapping[str, Any]) -> RequestOptions:
    """The options among `values`, which hold no null. An empty list is unset. Raises BadValue."""
    return RequestOptions.of(
        {
            name: spec.kind.from_json(name, values[name])
            for name, spec in CONFIG.items()
            if spec.in_file and values.get(name, []) not in ([], {})
        }
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _broken("is not readable JSON") from error
    if not isinstance(values, dict):
        raise _broken("must hold one JSON object")
    return {name: value for name, value in values.items() if value is not None}


def _broken(what: str) -> StartupError:
    return StartupError(f"{FILE_NAME} of the model {what}", flag="MODEL")


def _eos(value: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Split an id, a list of ids or a list of sequences of ids into single ids and longer runs."""
    entries = value if isinstance(value, list) else [] if value is None else [value]
    runs = [entry if isinstance(entry, list) else [entry] for entry in entries]
    if not all(run and all(type(token_id) is int and token_id >= 0 for token_id in run) for run in runs):
        raise _broken("has eos_token_id that is not an id, list of ids or list of sequences of ids")
    singles = dict.fromkeys(run[0] for run in runs if len(run) == 1)
    return tuple(singles), tuple(tuple(run) for run in runs if len(run) > 1)


def _model_runs(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the runs of ids that config.json has for ends; it is checked where the model is read."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError):
        return ()
    return _eos(value)[1] if isinstance(value, list) and any(isinstance(one, list) for one in value) else ()


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value or ()
    if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) and text for text in strings):
        raise _broken("has stop_strings that are not non-empty strings")
    return tuple(strings)


def _special_id(value: Any, name: str) -> int | None:
    if value is None or (type(value) is int and value < 1 << 32):  # it travels as uint32
        # Some files say -1 for "none".
        return value if value is None or value >= 0 else None
    raise _broken(f"has {name} that is not an id")


def _check(defaults: ModelDefaults, vocab_size: int, num_layers: int) -> None:
    options = defaults.options
    try:
        check_options(options, prefix="")
        check_ids(options, vocab_size, prefix="")
        check_possible(options, vocab_size, prefix="")
        # A request without any option must be able to run.
        model = ModelFacts("", vocab_size, max_context_tokens=vocab_size, num_layers=num_layers)
        resolve_modes(options, defaults, model, DEFAULT_LIMITS, options.num_return_sequences or 1)
    except InvalidArgument as error:
        raise _broken(f"has an impossible value: {error.message}") from error
    ids = (*defaults.eos_token_ids, *(token_id for run in defaults.eos_sequences for token_id in run))
    if max(ids, default=0) >= vocab_size:
        raise _broken(f"has eos_token_id outside the vocabulary of {vocab_size}")


def _ignored(values: Mapping[str, Any]) -> list[str]:
    """Settings that would change the output in transformers and do not here."""
    honoured = {name for name, spec in CONFIG.items() if spec.in_file} | _SPECIAL | IRRELEVANT_FIELDS
    return [name for name, value in values.items() if name not in honoured and value not in (False, [], {})]
