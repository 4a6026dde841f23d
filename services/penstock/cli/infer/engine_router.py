"""Router of this command's own before engines that serve: `penstock infer --endpoint vllm://HOST:PORT`.

The engine gets token ids, so templates, stop strings and tool calls are those of any other endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from types import TracebackType

from prometheus_client import CollectorRegistry

from penstock.common.checkpoint import resolve_model
from penstock.common.errors import StartupError
from penstock.router.app import RouterApp
from penstock.router.config import RouterConfig
from penstock.serving.server import RunningServer, Service
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig

_FLAG = "--endpoint"


class EngineRouter:
    """Tokenizer and router on free ports of loopback, in a thread of this process.

    A context manager: its address. At its end it raises what stopped either of them before.
    """

    def __init__(
        self, model: str | None, backends: str, *, start_seconds: float = RouterConfig.start_timeout_seconds
    ) -> None:
        """`model`: with the tokenizer of the engine's model; `backends`: as the router's --backend."""
        self._model, self._backends, self._start_seconds = model, backends, start_seconds
        self._ready: Future[str] = Future()
        # What ended it after the start.
        self._fault: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._work, name="infer-router", daemon=True)

    def __enter__(self) -> str:
        """Return the router's address once an engine is ready. Raises StartupError."""
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()
        if self._fault is not None:
            # The cause of what a caller met, if it did.
            raise self._fault

    def _end(self) -> None:
        # It may have ended by itself.
        with contextlib.suppress(RuntimeError):
            # While it starts, too: whoever interrupts a start does not wait for its end.
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            # By `_end`: nobody waits for the start any more.
            self._ready.cancel()
        except BaseException as error:
            # Whoever waits for the start, or comes to the end, hears of it: nobody else would.
            if self._ready.done():
                self._fault = error
            else:
                self._ready.set_exception(_told(error))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = TokenizerConfig(model=str(resolve_model(self._model)), port=0, metrics_port=-1)
        async with AsyncExitStack() as stack:
            tokenizer = await _running(stack, lambda registry: TokenizerApp(config, registry), config)
            routes = RouterConfig(
                tokenizer=(tokenizer.address,),
                backend=tuple(self._backends.split(",")),
                port=0,
                metrics_port=-1,
                start_timeout_seconds=self._start_seconds,
            )
            router = await _running(stack, lambda registry: RouterApp(routes, registry), routes)
            self._ready.set_result(router.address)
            # Until it is cancelled, or one of them fails.
            done, _ = await asyncio.wait(
                [one.service.failed for one in (tokenizer, router)], return_when=asyncio.FIRST_COMPLETED
            )
            raise done.pop().result()


async def _running(
    stack: AsyncExitStack, make: Callable[[CollectorRegistry], Service], config: TokenizerConfig | RouterConfig
) -> RunningServer:
    """Start a service for the life of the stack."""
    registry = CollectorRegistry()
    server = RunningServer(make(registry), config, registry)
    stack.push_async_callback(server.stop, drain=False)
    await server.listen()
    await server.start()
    return server


def _told(error: BaseException) -> BaseException:
    """Return a start's error with the flag of this command."""
    if isinstance(error, StartupError) and error.flag == "--backend":
        return StartupError(error.message.replace("--backend", _FLAG), flag=_FLAG)
    return error
