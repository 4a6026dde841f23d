"""A Penstock process that notes when a request passes each stage, for benchmarks/first_token.py.

    python benchmarks/_stamps.py FILE serve router --port ...

The services' own functions are wrapped before the command line runs; the services know nothing of it. A stamp is
(place, key, time.monotonic() in ns, processor time of the thread in ns); the clock is the machine's, so that stamps of
several processes compare. They are kept in memory and written to FILE, a JSON list, when the process ends. The key is
the request's number, which its id ends with and its message holds.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAMPS: list[tuple[str, str, int, int]] = []
Key = Callable[..., str]
_NUMBER = re.compile(r"number (\d+)")


def note(place: str, key: str) -> None:
    """Add a stamp; no key, no stamp."""
    if key:
        STAMPS.append((place, key, time.monotonic_ns(), time.thread_time_ns()))


def wrap(owner: Any, name: str, key: Key, before: str = "", after: str = "") -> None:
    """Stamp the calls of the function `owner.name`; `key` is given its arguments."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before:
            note(before, key(*arguments, **named))
        answer = inner(*arguments, **named)
        if after:
            note(after, key(*arguments, **named))
        return answer

    setattr(owner, name, wrapped)


def wrap_async(owner: Any, name: str, key: Key, before: str = "", after: str = "") -> None:
    """The same for a coroutine function."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        if before:
            note(before, key(*arguments, **named))
        answer = await inner(*arguments, **named)
        if after:
            note(after, key(*arguments, **named))
        return answer

    setattr(owner, name, wrapped)


def _in_text(text: str) -> str:
    found = _NUMBER.search(text)
    return found[1] if found else ""


def _of_messages(_: Any, request: Any, *__: Any) -> str:
    return _in_text(request.messages[0].content) if hasattr(request, "messages") else ""


def _of_id(request_id: str) -> str:
    """`bench-17` at the router, `bench-17.SUFFIX.0` behind it."""
    head, _, number = request_id.partition(".")[0].rpartition("-")
    return number if head == "bench" else ""


def _once() -> Callable[[str], str]:
    """Only the first stamp of a key counts: later tokens pass the same way."""
    seen: set[str] = set()

    def first(key: str) -> str:
        if key in seen:
            return ""
        seen.add(key)
        return key

    return first


def stamp_router() -> None:
    """Stamp the router, from the handler to the first delta's write."""
    from penstock.router.backends.session import BackendSession
    from penstock.router.frontend.generate import TextFlow
    from penstock.router.frontend.stream_writer import StreamWriter
    from penstock.router.requests.request_state import RequestState
    from penstock.router.tokenizer.detokenize import Detokenizer
    from penstock.router.tokenizer.tokenizer_link import TokenizerLink

    wrap_async(TextFlow, "run", _of_messages, before="router: handler")
    wrap_async(TokenizerLink, "apply_chat_template", _of_messages, "router: template asked", "router: prompt")
    wrap(BackendSession, "submit", lambda _, state, *__: _of_id(state.spec.request_id), after="router: submitted")
    first = _once()
    wrap(
        BackendSession, "_on_delta", lambda _, one, *__: first(_of_id(one.state.spec.request_id)), "router: token read"
    )
    wrap(
        Detokenizer,
        "_open",
        lambda _, __, piece: _of_id(piece.sequence.receiver.spec.request_id),
        after="router: decode",
    )
    text = _once()
    wrap(RequestState, "on_text", lambda state, *_: text(_of_id(state.spec.request_id)), before="router: text")
    begun, ended = _once(), _once()
    inner = StreamWriter._write_delta

    async def write_delta(writer: Any, delta: Any) -> None:
        key = _of_id(writer._state.spec.request_id)
        note("router: delta made", begun(key))
        await inner(writer, delta)
        note("router: delta written", ended(key))

    StreamWriter._write_delta = write_delta  # type: ignore[method-assign]


def stamp_tokenizer() -> None:
    """The handler of the template, the child's answer, and the encoding."""
    from penstock.tokenizer import servicer
    from penstock.tokenizer.template_pool import TemplatePool

    handler = servicer.TokenizerServicer
    wrap_async(handler, "ApplyChatTemplate", _of_messages, "tokenizer: handler", "tokenizer: answer")
    wrap_async(
        TemplatePool,
        "render",
        lambda _, request: _in_text(request["messages"][0]["content"]),
        "tokenizer: child asked",
        "tokenizer: child answered",
    )
    wrap(servicer, "_encode_chat", lambda _, rendered: _in_text(rendered.text), "tokenizer: encode", "tokenizer: ids")


def stamp_generation() -> None:
    """Stamp the generation service, from the command to the message with the first token."""
    from penstock.generation.delivery.hub import OutputHub
    from penstock.generation.delivery.streams import SessionStream
    from penstock.generation.engine.engine import Engine
    from penstock.generation.engine.loop import EngineLoop
    from penstock.generation.engine.report import RequestReport
    from penstock.generation.rpc.generation import GenerationServicer

    def ids(_: Any, request: Any, *__: Any) -> str:
        return _of_id(request.request_id)

    wrap(GenerationServicer, "_submit", ids, "generation: command", "generation: queued")
    wrap(Engine, "add", ids, "generation: engine has it")
    begun = _once()
    wrap(RequestReport, "scheduled", lambda report, *_: begun(_of_id(report.request.request_id)), "generation: step")
    first, delivered, sent = _once(), _once(), _once()
    for owner, name, once, place in (
        (EngineLoop, "_publish", first, "generation: step done"),
        (OutputHub, "deliver", delivered, "generation: delivered"),
    ):
        _stamp_outputs(owner, name, once, place)
    _stamp_outputs(SessionStream, "deliver", sent, "generation: message made", after=True)


def _stamp_outputs(owner: Any, name: str, once: Callable[[str], str], place: str, *, after: bool = False) -> None:
    """Stamp the requests that a step's list of outputs has the first token of."""
    inner = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any) -> Any:
        keys = [once(_of_id(output.request.request_id)) for output in arguments[-1] if output.deltas]
        if not after:
            for key in keys:
                note(place, key)
        answer = inner(self, *arguments)
        if after:
            for key in keys:
                note(place, key)
        return answer

    setattr(owner, name, wrapped)


_ROLES = {"router": stamp_router, "tokenizer": stamp_tokenizer, "generation": stamp_generation}


def main() -> None:
    """Wrap, run the command line, write the stamps."""
    out = Path(sys.argv.pop(1))
    from penstock.cli.main import main as run
    from penstock.common.environment import prepare_environment

    prepare_environment()
    _ROLES[sys.argv[2]]()
    try:
        run()
    finally:
        out.write_text(json.dumps(STAMPS))


if __name__ == "__main__":
    main()
