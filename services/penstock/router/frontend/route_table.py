"""Table of the models' routes: which one a request takes by its `model`, and changes of the file."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.common.errors import InvalidArgument, NotFound, StartupError
from penstock.common.logging import get_logger
from penstock.common.model_names import those_there_are
from penstock.router.backends.backend import Backend
from penstock.router.frontend.routed_model import RoutedModel
from penstock.router.keys.key_desk import KeyDesk
from penstock.router.models_file import ModelEntry, ModelsFile

_log = get_logger("penstock.router")


@dataclass(frozen=True, slots=True)
class AppliedFile:
    """Changes that another file made, by names of models."""

    added: Sequence[str] = ()
    changed: Sequence[str] = ()
    removed: Sequence[str] = ()
    # Name -> why the model is served as before.
    failed: Sequence[tuple[str, str]] = ()


class Asking(Protocol):
    """A request that names a model. The route's own name replaces that."""

    model: str


class RouteTable:
    """Routes by name. Belongs to one event loop."""

    def __init__(
        self,
        make_route: Callable[[ModelEntry | None], RoutedModel],
        drain_grace_seconds: float,
        start_seconds: float,
        keys: KeyDesk | None = None,
    ) -> None:
        """Make it, empty. `drain_grace_seconds`: time that streams of a model have once it is gone from the file;
        `start_seconds`: time for a model's new tokenizer and backends to become ready; `keys`: of the callers, None
        without a file of keys."""
        self.keys = keys
        self._make_route = make_route
        self._drain_grace_seconds = drain_grace_seconds
        self._start_seconds = start_seconds
        # Without a file of models: one route, named "".
        self._routes: dict[str, RoutedModel] = {}
        self._default = ""
        # Alias -> the models that have it.
        self._sharers: dict[str, list[RoutedModel]] = {}
        # Alias and model -> its credit: the one with the most is next.
        self._credits: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def routes(self) -> list[RoutedModel]:
        """All routes that take requests."""
        return list(self._routes.values())

    @property
    def is_ready(self) -> bool:
        """True while a request for some model could be answered."""
        return any(route.is_ready for route in self._routes.values())

    @property
    def backends(self) -> list[Backend]:
        """Backends of all models."""
        return [backend for route in self._routes.values() for backend in route.pool.backends]

    @property
    def sharers(self) -> dict[str, list[RoutedModel]]:
        """Aliases, and the models that each stands for."""
        return self._sharers

    @property
    def default(self) -> str:
        """Name for requests without one; empty where there is none."""
        return self._default

    def begin(self, file: ModelsFile | None) -> None:
        """Make and start the routes of a file; without one, the only route."""
        for entry in file.models if file is not None else (None,):
            self._add(entry)
        self._set_names(file)

    def route_of(self, name: str) -> RoutedModel | None:
        """Return the route of a model by its own name."""
        return self._routes.get(name)

    def choose(self, request: Asking, adapter: str = "", session: str = "") -> RoutedModel:
        """Choose a request's route and put the model's own name into it.

        A name that several models have goes to each by its weight, and requests of one session to one of them.
        Raises NotFound, and InvalidArgument when `model` must be set.
        """
        if (only := self._routes.get("")) is not None:
            return only
        asked = request.model or self._default_for(adapter)
        route = self._routes.get(asked)
        if route is None and asked in self._sharers:
            route = self._shared(asked, session)
        if route is None:
            # An adapter's name: the route's own pool knows it.
            return self._route_with(asked)
        request.model = route.name
        return route

    def _default_for(self, adapter: str) -> str:
        """Return the name that stands for none. Raises InvalidArgument."""
        if adapter:
            having = [route.name for route in self._routes.values() if adapter in _adapters_of(route)]
            if len(having) == 1:
                return having[0]
        if self._default:
            return self._default
        if len(self._routes) > 1:
            raise InvalidArgument("model", "must be set: several models are served (ListModels names them)")
        return next(iter(self._routes), "")

    def _shared(self, alias: str, session: str) -> RoutedModel:
        """Choose among the models of an alias by weight; one that cannot answer now gets nothing."""
        having = [route for route in self._sharers[alias] if _weight(route)]
        able = [route for route in having if route.takes_requests] or having
        total = sum(map(_weight, able))
        if len(able) == 1:
            return able[0]
        if session:
            # The same share of [0, 1) for all requests of a session, in every router.
            place = int.from_bytes(hashlib.sha256(f"{alias}:{session}".encode()).digest()[:8]) / 2**64 * total
            for route in able:
                place -= _weight(route)
                if place < 0:
                    return route
            return able[-1]
        # Smooth weighted turns, as nginx has them: shares are exact, and the small one is spread evenly.
        for route in able:
            self._credits[alias, route.name] += _weight(route)
        chosen = max(able, key=lambda route: self._credits[alias, route.name])
        self._credits[alias, chosen.name] -= total
        return chosen

    def _route_with(self, asked: str) -> RoutedModel:
        having = [route for route in self._routes.values() if asked in _adapters_of(route)]
        if len(having) > 1:
            raise InvalidArgument(
                "model", "is an adapter of several models: name it in `adapter`, and one of them here"
            )
        if not having:
            adapters = [name for route in self._routes.values() for name in _adapters_of(route)]
            there = those_there_are([*self._routes, *self._sharers, *adapters])
            raise NotFound(
                f"model: no model or adapter of this name is served; {there}", reason="MODEL_NOT_FOUND", field="model"
            )
        return having[0]

    async def apply(self, file: ModelsFile) -> AppliedFile:
        """Serve another file. No stream is lost: what is new starts first, what is gone finishes its streams."""
        before = {name: route.entry for name, route in self._routes.items()}
        wanted = {entry.name: entry for entry in file.models}
        added = [name for name in wanted if name not in before]
        removed = [name for name in before if name not in wanted]
        changed = [name for name, entry in wanted.items() if name in before and before[name] != entry]
        replaced = {}
        for name in changed:
            if self._routes[name].can_become(wanted[name]):
                self._routes[name].become(wanted[name])
            else:
                replaced[name] = self._make_route(wanted[name])
                replaced[name].start()
        for name in added:
            self._add(wanted[name])
        for name in removed:
            self._retire(self._routes.pop(name))
        # In the order of the file.
        self._routes = {name: self._routes[name] for name in wanted}
        self._set_names(file)
        failed = await self._replace(replaced)
        self._set_names(file)
        broken = {name for name, _ in failed}
        return AppliedFile(added, [name for name in changed if name not in broken], removed, failed)

    async def close(self) -> None:
        """Disconnect from everything."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(route.close() for route in self._routes.values()))

    async def _replace(self, replaced: dict[str, RoutedModel]) -> list[tuple[str, str]]:
        """Put each new route into the place of the old one once it is ready. Return those that are not in time."""
        until = time.monotonic() + self._start_seconds
        results = await asyncio.gather(
            *(route.wait_ready(until) for route in replaced.values()), return_exceptions=True
        )
        failed = []
        for (name, route), result in zip(replaced.items(), results, strict=True):
            if isinstance(result, StartupError):
                _log.error("model served as before: its new entry does not start", model=name, cause=result.message)
                failed.append((name, result.message))
                await route.leave_slot()
                await route.close()
            elif result is not None:
                raise result
            else:
                self._retire(self._routes[name])
                self._routes[name] = route
        return failed

    def _add(self, entry: ModelEntry | None) -> None:
        route = self._make_route(entry)
        self._routes[route.name] = route
        route.start()

    def _set_names(self, file: ModelsFile | None) -> None:
        self._default = file.default if file is not None else ""
        self._sharers = {}
        for route in self._routes.values():
            for alias in route.entry.aliases if route.entry is not None else ():
                self._sharers.setdefault(alias, []).append(route)
        self._credits.clear()

    def _retire(self, route: RoutedModel) -> None:
        task = asyncio.ensure_future(self._retired(route))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retired(self, route: RoutedModel) -> None:
        """Let a route's requests end, then close it."""
        route.drain()
        try:
            try:
                async with asyncio.timeout(self._drain_grace_seconds):
                    await route.wait_until_empty()
            except TimeoutError:
                route.end_grace()
                await route.wait_until_empty()
            await route.leave_slot()
            _log.info("model gone", model=route.name)
        finally:
            await route.close()


def _weight(route: RoutedModel) -> float:
    return route.entry.weight if route.entry is not None else 1.0


def _adapters_of(route: RoutedModel) -> list[str]:
    return [adapter for model in route.pool.models for adapter in route.pool.adapters(model)]
