"""Loading of the server owner's logits processors and stopping criteria by name, and making them for a request.

A plugin is a class (or any callable that returns one's object) with transformers' signature: a processor is called with
(input_ids, scores) and returns scores, a criterion with (input_ids, scores) and returns a truth for the row.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from penstock.common.errors import InvalidArgument, StartupError
from penstock.common.logging import get_logger
from penstock.generation.core.plugins import (
    NO_OBJECTS,
    CallerObjects,
    Plugin,
    PluginChoice,
    RequestPlugins,
    plugin_failed,
)
from penstock.generation.options.table import RequestOptions

_log = get_logger("penstock.generation")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Factory = Callable[..., Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class PluginRegistry:
    """Loaded plugins by name. Never changes."""

    processors: Mapping[str, Factory] = field(default_factory=dict)
    criteria: Mapping[str, Factory] = field(default_factory=dict)

    def make(self, options: RequestOptions, own: CallerObjects = NO_OBJECTS) -> RequestPlugins | None:
        """Make the plugins that a request names, beside the caller's `own` objects; None: there are none.

        Raises InvalidArgument for an unknown name and for parameters that are no JSON object or that the plugin refuses
        (TypeError, ValueError), Internal where its constructor fails otherwise.
        """
        processors, criteria = options.logits_processor or (), options.stopping_criteria or ()
        if not processors and not criteria and not own.has_plugins:
            return None
        return RequestPlugins(
            (*(_make("config.logits_processor", self.processors, choice) for choice in processors), *own.processors),
            tuple(
                Plugin(made.name, partial(_is_met, made.call))
                for made in (
                    *(_make("config.stopping_criteria", self.criteria, choice) for choice in criteria),
                    *own.criteria,
                )
            ),
            own.allowing,
        )


def load_plugins(processors: tuple[str, ...], criteria: tuple[str, ...]) -> PluginRegistry:
    """Import the plugins of `--logits-processor` and `--stopping-criteria`, each NAME=MODULE:CLASS.

    Raises StartupError naming the flag.
    """
    found = PluginRegistry(
        dict(_load("--logits-processor", text) for text in _unique("--logits-processor", processors)),
        dict(_load("--stopping-criteria", text) for text in _unique("--stopping-criteria", criteria)),
    )
    if processors or criteria:
        _log.info("plugins", logits_processors=sorted(found.processors), stopping_criteria=sorted(found.criteria))
    return found


def _unique(flag: str, texts: tuple[str, ...]) -> tuple[str, ...]:
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise StartupError(f"{flag} has the name {name} twice", flag=flag)
    return texts


def _load(flag: str, text: str) -> tuple[str, Factory]:
    name, _, place = text.partition("=")
    module, _, path = place.partition(":")
    if not _NAME.fullmatch(name) or not module or not path:
        raise StartupError(f"{flag} {text!r}: expected NAME=MODULE:CLASS", flag=flag)
    try:
        loaded: Any = importlib.import_module(module)
        for part in path.split("."):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:
        # The module is the owner's: whatever it raises is told in the owner's terminal.
        cause = f"{type(error).__name__}: {error}"
        raise StartupError(f"{flag} {text}: cannot be loaded: {cause} (is it on PYTHONPATH?)", flag=flag) from error
    if not callable(loaded):
        raise StartupError(f"{flag} {text}: {path} is no class", flag=flag)
    return name, loaded


def _make(field: str, known: Mapping[str, Factory], choice: PluginChoice) -> Plugin:
    factory = known.get(choice.name)
    if factory is None:
        raise InvalidArgument(field, "names a plugin that the server has not loaded", reason="PLUGIN_NOT_FOUND")
    try:
        parameters = json.loads(choice.parameters or "{}")
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidArgument(field, "every entry's parameters must be one JSON object")
    try:
        made = factory(**parameters)
    except (TypeError, ValueError):
        raise InvalidArgument(field, f"the plugin {choice.name} refuses its parameters") from None
    except (Exception, SystemExit) as error:
        raise plugin_failed(field, choice.name, error) from error
    if not callable(made):
        raise plugin_failed(field, choice.name, "is no callable once it is made")
    return Plugin(choice.name, made)


def _is_met(criterion: Callable[..., Any], token_ids: list[int], scores: None) -> bool:
    """Ask transformers' criterion about one row. It gets no scores, as there unless they are asked for."""
    return bool(torch.as_tensor(criterion(torch.tensor([token_ids], dtype=torch.int64), scores)).all())
