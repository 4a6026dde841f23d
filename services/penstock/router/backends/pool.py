"""Set of the generation backends: it follows the addresses that configured names resolve to, and tells ready ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from penstock.common.errors import InvalidArgument, NotFound
from penstock.common.logging import get_logger
from penstock.common.model_names import those_there_are
from penstock.router.aio import Wakeup
from penstock.router.backends.absences import Absences
from penstock.router.backends.backend import Backend
from penstock.router.backends.candidate_list import CandidateList
from penstock.router.backends.crash_log import CrashLog
from penstock.router.backends.discovery import BackendAddress, Discovery, Resolver, resolve
from penstock.router.backends.link import BackendState
from penstock.router.backends.outliers import OutlierConfig, Outliers
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import model_pb2, tokenizer_pb2

_log = get_logger("penstock.router")


class BackendPool:
    """Backends by address. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        *,
        tokenizer: Callable[[], tokenizer_pb2.GetTokenizerResponse],
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        on_kept: Callable[[Backend, Sequence[int]], None],
        resolver: Resolver = resolve,
    ) -> None:
        """Make it. `tokenizer` returns the facts of ours. `on_change`: some backend's state changed. `on_failure`: a
        bug ended a task that must not end. `on_kept`: one of a crowd that is not compared as a whole told of cached
        blocks with these names."""
        self._config = config
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._notify = on_change
        self._on_failure = on_failure
        self._on_kept = on_kept
        self._targets = config.backend
        self._wanted = frozenset(self._targets)
        self._targets_changed = Wakeup()
        self._discovery = Discovery(config, resolver, on_change=self._targets_changed.set, spawn=self._spawn)
        self._backends: dict[BackendAddress, Backend] = {}
        self._tasks: dict[BackendAddress, asyncio.Task[None]] = {}
        # Those that are other engines.
        self._num_engines = 0
        # Backends that no name resolves to any more: they finish their streams (a rolling restart) and get nothing new.
        self._leaving: set[BackendAddress] = set()
        # Of each model, and of each model and adapter, that has some: its ready backends, and those of them that get
        # requests, until a state or an adapter changes. And the ejected ones of each model.
        self._ready_of: dict[tuple[str, str], CandidateList[Backend]] = {}
        self._usable_of: dict[tuple[str, str], CandidateList[Backend]] = {}
        self._ejected_of: dict[str, set[Backend]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self.crashes = CrashLog(self.wake)
        self.absences = Absences()
        self.outliers = Outliers(
            OutlierConfig(
                consecutive=config.eject_consecutive_failures,
                share=config.eject_failure_share,
                min_requests=config.eject_min_requests,
                window_seconds=config.eject_window_seconds,
                seconds=config.eject_seconds,
                max_seconds=config.eject_max_seconds,
                max_share=config.eject_max_share,
                probe_seconds=config.probe_timeout_seconds,
                probes=config.probes,
            ),
            self._peers,
            self._on_ejection,
        )
        self._models: dict[str, model_pb2.GetModelInfoResponse] = {}
        # Of each model, the facts that its ready backends tell.
        self._told: defaultdict[str, dict[BackendAddress, model_pb2.GetModelInfoResponse]] = defaultdict(dict)
        # Name of the model that each backend served last, and the number of backends for each of these.
        self._served: dict[BackendAddress, str] = {}
        # Ready backends, the number of them for each name, and the names that were told their numbers.
        self._up: set[BackendAddress] = set()
        self._num_up: Counter[str] = Counter()
        self._shown: tuple[str, ...] | None = None

    def start(self) -> None:
        """Begin to resolve and connect."""
        self._follower = self._spawn(self._follow_names())

    def follow(self, targets: tuple[str, ...]) -> None:
        """Follow other names in place of those of the configuration.

        Backends of the old ones finish their streams, and get new requests until one of the new ones is ready.
        """
        for target in set(self._targets) - set(targets):
            self._metrics.backends_up.labels(target).set(0)
        self._targets, self._wanted = targets, frozenset(targets)
        self._targets_changed.set()

    async def close(self) -> None:
        """Disconnect from everything."""
        tasks = [*self._tasks.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._discovery.close()
        self._tasks.clear()

    @property
    def backends(self) -> list[Backend]:
        """All known backends."""
        return list(self._backends.values())

    @property
    def models(self) -> dict[str, model_pb2.GetModelInfoResponse]:
        """Models served now or before, by name."""
        return self._models

    @property
    def are_all_own(self) -> bool:
        """True while no backend is another engine: all can do the same."""
        return not self._num_engines

    def ready(self, model: str = "", adapter: str = "") -> CandidateList[Backend]:
        """Backends that take requests: of one model when named, and that have an adapter when named. Read only."""
        ready = self._ready_of.get((model, adapter))
        if ready is None:
            ready = CandidateList(self._find_ready(model, adapter))
            # Callers may ask for any name.
            if ready:
                self._ready_of[model, adapter] = ready
        return ready

    def _find_ready(self, model: str, adapter: str) -> Iterator[Backend]:
        if adapter:
            return (one for one in self.ready(model) if adapter in one.adapters.known)
        return (
            backend
            for where, backend in self._backends.items()
            if backend.link.is_ready and where not in self._leaving and (not model or backend.link.serves(model))
        )

    def usable(self, model: str = "", adapter: str = "") -> CandidateList[Backend]:
        """Return the ready backends that are not ejected; the ejected ones when there is no other. Read only."""
        usable = self._usable_of.get((model, adapter))
        if usable is None:
            ready, ejected = self.ready(model, adapter), self._ejected(model)
            usable = CandidateList(one for one in ready if one not in ejected) or ready if ejected else ready
            if usable:
                self._usable_of[model, adapter] = usable
        return usable

    def _ejected(self, model: str) -> set[Backend]:
        """Return the ready backends of a model that are ejected."""
        ejected = self._ejected_of.get(model)
        if ejected is None:
            ready = self.ready(model)
            ejected = {one for one in ready if self.outliers.is_ejected(one.key)}
            if ready:
                self._ejected_of[model] = ejected
        return ejected

    def to_probe(self, model: str, adapter: str = "") -> Backend | None:
        """Return an ejected backend to which one request may be sent now, to see whether it has recovered."""
        if not self._ejected(model):
            return None
        ejected = [backend for backend in self.ready(model, adapter) if self.outliers.wants_probe(backend.key)]
        return next((backend for backend in ejected if not backend.load.is_full), None)

    def adapters(self, model: str) -> list[str]:
        """Names of the adapters of a model that some backend has, or had when it was lost."""
        found = (name for backend in self.of_model(model) for name in backend.adapters.known.names)
        return list(dict.fromkeys(found))

    def adapter_path(self, model: str, adapter: str) -> str:
        """Path of an adapter below the root of a backend that has it; empty when none tells one."""
        paths = (backend.adapters.known.path_of(adapter) for backend in self.of_model(model))
        return next(filter(None, paths), "")

    def has_adapter(self, model: str, adapter: str) -> bool:
        """True when some backend of a model has an adapter, or had it when it was lost."""
        # Most often a ready one, which is known without a look at all of them.
        return bool(self.ready(model, adapter)) or any(adapter in one.adapters.known for one in self.of_model(model))

    def of_model(self, model: str) -> Iterator[Backend]:
        """Backends of a model, in whatever state; an empty name is any model's."""
        return (one for one in self._backends.values() if not model or one.link.serves(model))

    def is_any_starting(self, model: str) -> bool:
        """True while a process is there that does not serve yet, and that may come to serve the model."""
        return any(
            link.is_starting and (link.info is None or link.serves(model))
            for link in (backend.link for backend in self._backends.values())
        )

    def only_mismatches(self) -> bool:
        """True when every known backend was turned away for its tokenizer fingerprint."""
        states = {backend.link.state for backend in self._backends.values()}
        return states == {BackendState.MISMATCH}

    def choose_model(self, asked: str, adapter: str = "") -> tuple[str, str]:
        """Choose the names of model and adapter; empty while no model is known, and without an adapter.

        `asked` may be an adapter's name. Raises NotFound; InvalidArgument when `model` must be set, or where `adapter`
        is another one than `asked`.
        """
        asked = self._model_of_alias(asked)
        if asked and self._models and asked not in self._models:
            return self._model_of_adapter(asked, adapter)
        if not asked and adapter and len(self._models) > 1:
            # The adapter may tell which.
            having = [name for name in self._models if self.has_adapter(name, adapter)]
            if len(having) == 1:
                return having[0], adapter
        served = [asked] if asked else [name for name in self._models if self.ready(name)] or list(self._models)
        if len(served) > 1:
            raise InvalidArgument("model", "must be set: several models are served (ListModels names them)")
        return next(iter(served), ""), adapter

    def _model_of_alias(self, asked: str) -> str:
        """Return the name of the model that `asked` is a further name of; else `asked`."""
        if not asked or asked in self._models:
            return asked
        return next((name for name, info in self._models.items() if asked in info.aliases), asked)

    def _model_of_adapter(self, asked: str, adapter: str) -> tuple[str, str]:
        """Return model and adapter for a `model` that is no model's name."""
        having = [name for name in self._models if self.has_adapter(name, asked)]
        if not having:
            names = [one for name in self._models for one in (name, *self._models[name].aliases, *self.adapters(name))]
            raise NotFound(
                f"model: no backend serves a model or an adapter of this name; {those_there_are(names)}",
                reason="MODEL_NOT_FOUND",
                field="model",
            )
        if len(having) > 1:
            raise InvalidArgument(
                "model", "is an adapter of several models: name it in `adapter`, and one of them here"
            )
        if adapter not in ("", asked):
            raise InvalidArgument("adapter", "must be left out where `model` is an adapter")
        return having[0], asked

    async def changed(self, timeout: float) -> bool:
        """Wait until any backend changes state; False after `timeout` seconds."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    async def _follow_names(self) -> None:
        while True:
            targets = self._targets
            found = await self._discovery.find(targets)
            if targets is not self._targets:
                continue
            self._apply(found)
            dropped = self._drop(targets)
            # Streams of dropped backends end at any time, and somebody may wait for that.
            seconds = self._config.reconnect_min_seconds if dropped else self._config.resolve_interval_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._targets_changed.wait()

    def _drop(self, targets: tuple[str, ...]) -> bool:
        """Let backends go that are of no present name; True while some are left."""
        wanted = set(targets)
        dropped = [where for where in self._backends if where.target not in wanted]
        present = [backend for where, backend in self._backends.items() if where.target in wanted]
        if dropped and (not targets or any(backend.link.is_ready for backend in present)):
            self._leaving.update(dropped)
            self._forget_ready()
            for where in dropped:
                self._note(where)
                if self._backends[where].in_flight == 0:
                    self._remove(where)
        return any(where.target not in wanted for where in self._backends)

    def _apply(self, found: dict[str, set[BackendAddress]]) -> None:
        known_of = defaultdict[str, set[BackendAddress]](set)
        for where in self._backends:
            known_of[where.target].add(where)
        for target, addresses in found.items():
            known = known_of[target]
            for where in sorted(addresses - known, key=lambda one: one.address):
                self._add(where)
            returned = self._leaving & addresses
            self._leaving -= addresses
            self._leaving |= known - addresses
            self._forget_ready()
            for where in returned:
                self._note(where)
            for where in known - addresses:
                self._note(where)
                if self._backends[where].in_flight == 0:
                    self._remove(where)

    def _add(self, where: BackendAddress) -> None:
        backend = Backend(
            where,
            self._config,
            self._detokenizer,
            self._metrics,
            tokenizer=self._tokenizer,
            on_change=partial(self._on_change, where),
            on_kept=self._note_kept,
            crashes=self.crashes,
            outliers=self.outliers,
        )
        self._backends[where] = backend
        self._num_engines += not backend.is_own
        self._forget_ready()
        self._tasks[where] = self._spawn(backend.link.run())
        _log.info("backend found", backend=where.address, target=where.target)

    def _note_kept(self, backend: Backend, names: Sequence[int]) -> None:
        if len(self._backends) > self._config.max_compared_backends:
            self._on_kept(backend, names)

    def _remove(self, where: BackendAddress) -> None:
        self._tasks.pop(where).cancel()
        self._num_engines -= not self._backends.pop(where).is_own
        self.outliers.forget(where.address)
        self._leaving.discard(where)
        self._forget_ready()
        _log.info("backend gone from its name", backend=where.address, target=where.target)
        self._on_change(where)
        self._served.pop(where, None)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._on_failure(error)

    def _peers(self, key: str) -> list[str]:
        """Keys of the ready backends of the same model, itself included."""
        models = {one.key: one.link.info.model if one.link.info else "" for one in self.ready()}
        return [one for one, model in models.items() if key in models and model == models[key]]

    def _on_ejection(self, key: str, cause: str) -> None:
        """Count an ejection, or the return of a backend (no cause)."""
        keys = defaultdict[str, list[str]](list)
        for where, backend in self._backends.items():
            keys[where.target].append(backend.key)
        for target in self._targets:
            own = keys[target]
            if cause and key in own:
                self._metrics.ejections.labels(target, cause).inc()
            self._metrics.backends_ejected.labels(target).set(sum(map(self.outliers.is_ejected, own)))
        self._on_change()

    def _forget_ready(self) -> None:
        self._ready_of.clear()
        self._usable_of.clear()
        self._ejected_of.clear()

    def _on_change(self, where: BackendAddress | None = None) -> None:
        """Take a change: of one backend, or of what is ejected. Its time does not grow with the number of backends."""
        self._forget_ready()
        if where is not None:
            self._note(where)
        self.wake()
        self._notify()

    def _note(self, where: BackendAddress) -> None:
        """Note a backend as it is now: whom it serves, who is missed since when, and the number of its name."""
        backend = self._backends.get(where)
        info = None if backend is None else backend.link.info
        is_ready = backend is not None and backend.link.is_ready and where not in self._leaving
        self._note_told(where, info if is_ready else None)
        adapters = () if backend is None else backend.adapters.known.names
        self.absences.note(where, None if info is None else info.model, adapters, is_ready=is_ready)
        if is_ready != (where in self._up):
            (self._up.add if is_ready else self._up.remove)(where)
            self._num_up[where.target] += 1 if is_ready else -1
        told = (where.target,) if self._shown is self._targets else self._targets
        self._shown = self._targets
        for target in told:
            if target in self._wanted:
                self._metrics.backends_up.labels(target).set(self._num_up[target])

    def _note_told(self, where: BackendAddress, info: model_pb2.GetModelInfoResponse | None) -> None:
        """Note the facts that a ready backend tells; None: it tells none now."""
        before = self._served.get(where)
        if before is not None and (info is None or info.model != before):
            self._told[before].pop(where, None)
            self._show_told(before)
        if info is not None:
            self._told[info.model][where] = info
            self._show_told(info.model)
            self._note_served(where, info.model)

    def _show_told(self, model: str) -> None:
        """Show the facts of the backend that became ready last; without one they stay as they are."""
        told = self._told[model]
        if told:
            self._models[model] = next(reversed(told.values()))
        else:
            del self._told[model]

    def _note_served(self, where: BackendAddress, model: str) -> None:
        """Note a backend's model. The one that it had before is forgotten, unless another backend has it, too."""
        before = self._served.get(where)
        self._served[where] = model
        if before not in (None, model) and before not in self._served.values():
            self._models.pop(before, None)

    def wake(self) -> None:
        """End every wait of `changed`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
