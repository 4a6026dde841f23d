"""Event loop of a service's process: uvloop's, in C, or asyncio's own.

uvloop 0.23 takes a fifth off a router's and a gateway's instructions (docs/guide/performance.md). What listens with TLS
stays on asyncio's loop: the bounds on handshakes (`http2/tls_arrivals.py`) are built on its TLS, which can be told when
to go on.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

from penstock.common.errors import StartupError

ResultT = TypeVar("ResultT")
EventLoop = Literal["auto", "uvloop", "asyncio"]
_FLAG = "--event-loop"


def loop_factory(wanted: EventLoop, *, is_tls: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loop; None: asyncio's own. `is_tls`: the process listens with TLS.

    Raises StartupError where uvloop was asked for by name and cannot be had.
    """
    if wanted == "asyncio" or (wanted == "auto" and is_tls):
        return None
    if is_tls:
        raise StartupError(f"{_FLAG} uvloop cannot serve TLS: leave --tls-cert out, or {_FLAG} at auto", flag=_FLAG)
    if find_spec("uvloop") is None:
        if wanted == "auto":
            return None
        raise StartupError(f"{_FLAG} uvloop needs its package: pip install uvloop", flag=_FLAG)
    make: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return make


def run(main: Coroutine[Any, Any, ResultT], factory: Callable[[], asyncio.AbstractEventLoop] | None) -> ResultT:
    """Run `main` to its end on a new loop of `factory` (of asyncio: None), and return its result. Raises as it does."""
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def running_loop_name() -> str:
    """Return the package of the running event loop: uvloop or asyncio."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]
