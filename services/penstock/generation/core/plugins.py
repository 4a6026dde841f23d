"""The server owner's own logits processors and stopping criteria, as a request has them. Plain data: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from penstock.common.errors import Internal, PenstockError


class PluginChoice(NamedTuple):
    """A request's wish: the name of a loaded plugin, and its constructor's keyword arguments as a JSON object."""

    name: str
    parameters: str = ""


class Plugin(NamedTuple):
    """An object made for one request."""

    name: str
    # (input_ids, scores) -> scores, or (input_ids, None) -> a bool, as transformers' classes; tensors of one row.
    call: Callable[[Any, Any], Any]


class CallerObjects(NamedTuple):
    """Objects of a caller in the engine's own process, for one request. The engine's thread calls them."""

    processors: tuple[Plugin, ...] = ()
    # Processors that choose the allowed tokens; they take the place of prefix_allowed_tokens_fn.
    allowing: tuple[Plugin, ...] = ()
    # Called with ids and None.
    criteria: tuple[Plugin, ...] = ()
    # (ids so far, most tokens) -> drafts; None: none of the caller's own.
    drafts: Callable[[list[int], int], list[int]] | None = None

    @property
    def has_plugins(self) -> bool:
        """True when the sampler or the stopping criteria have to call one."""
        return bool(self.processors or self.allowing or self.criteria)


NO_OBJECTS = CallerObjects()


class RequestPlugins:
    """Plugins of one request, which all its sequences share. The engine's thread calls them."""

    __slots__ = ("allowing", "criteria", "error", "processors")

    def __init__(
        self,
        processors: tuple[Plugin, ...] = (),
        criteria: tuple[Plugin, ...] = (),
        allowing: tuple[Plugin, ...] = (),
    ) -> None:
        self.allowing = allowing
        self.processors = processors
        self.criteria = criteria
        # Failure of a processor, which ends the request after the step.
        self.error: PenstockError | None = None


def plugin_failed(field: str, name: str, cause: str | BaseException) -> Internal:
    """Return the error for a request with a failed plugin, and log the exception.

    `cause` is a text about the plugin's answer, or the exception; the caller learns only its type.
    """
    # Imported here: the command line reads the table of options and should start without grpc.
    from penstock.common.errors import Internal
    from penstock.common.logging import get_logger

    raised = cause if isinstance(cause, BaseException) else None
    if isinstance(cause, BaseException):
        get_logger("penstock.generation").error("a plugin raised", field=field, plugin=name, exc_info=cause)
        cause = f"raised {type(cause).__name__}"
    failure = Internal(
        f"{field}: the plugin {name} {cause}", reason="PLUGIN_FAILED", metadata={"plugin": name}, field=field
    )
    # For a caller in this very process.
    failure.__cause__ = raised
    return failure
