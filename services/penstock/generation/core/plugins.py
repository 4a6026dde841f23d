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
    """An object that was made for one request."""

    name: str
    # (input_ids, scores) -> scores, or (input_ids, None) -> a truth, as transformers' classes; tensors of one row.
    call: Callable[[Any, Any], Any]


class RequestPlugins:
    """Plugins of one request, which all its sequences share. The engine's thread calls them."""

    __slots__ = ("criteria", "error", "processors")

    def __init__(self, processors: tuple[Plugin, ...] = (), criteria: tuple[Plugin, ...] = ()) -> None:
        self.processors = processors
        self.criteria = criteria
        # Failure of a processor, which ends the request after the step.
        self.error: PenstockError | None = None


def plugin_failed(field: str, name: str, cause: str | BaseException) -> Internal:
    """Return the error of a request whose plugin failed, and log an exception that it raised.

    `cause` is a text about the plugin's answer, or the exception, of which the caller gets the type alone.
    """
    # Here, since the command line reads the table of options, and should start without grpc.
    from penstock.common.errors import Internal
    from penstock.common.logging import get_logger

    if isinstance(cause, BaseException):
        get_logger("penstock.generation").error("a plugin raised", field=field, plugin=name, exc_info=cause)
        cause = f"raised {type(cause).__name__}"
    return Internal(
        f"{field}: the server's plugin {name} {cause}", reason="PLUGIN_FAILED", metadata={"plugin": name}, field=field
    )
