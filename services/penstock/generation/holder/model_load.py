"""One load by a call: bytes arrive, or a path is looked up, then the model is loaded, all of it or nothing."""

from __future__ import annotations

import asyncio
import re
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.common.errors import (
    Cancelled,
    DoesNotFit,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    StartupError,
)
from penstock.common.gguf_parts import SUFFIX, existing_parts
from penstock.common.logging import get_logger
from penstock.common.progress import RECEIVE, CancellableProgress, ShowProgress, StageProgress, StartCancelled
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.load_order import LoadOrder
from penstock.generation.core.model_config import CONFIG_FILE
from penstock.generation.devices.device_registry import open_device
from penstock.generation.holder.upload import (
    WEIGHTS_SUFFIX,
    UploadFolder,
    UploadLimits,
    check_files,
    free_disk,
    upload_parent,
)
from penstock.generation.metrics import LoadMetrics
from penstock.generation.models.registry import read_model_config
from penstock.generation.service import GenerationCore
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.memory_check import check_weights

_NAME = re.compile(r"[\w./:@-]{1,128}", re.ASCII)
_PATH_FIELD, _FILES_FIELD = "start.path", "start.upload.files"
# Of a message about files: it contains names from the caller.
_MAX_MESSAGE_CHARS = 600
T = TypeVar("T")
_log = get_logger("penstock.generation")


class LoadingHolder(Protocol):
    """The holder as a load sees it."""

    config: GenerationServiceConfig

    def load_on_thread(self, config: GenerationServiceConfig, progress: CancellableProgress) -> Future[LoadedModel]:
        """Load on a thread of its own, which gives up once `progress` is cancelled."""

    def begin(
        self, loaded: LoadedModel, config: GenerationServiceConfig, began: float, folder: UploadFolder | None
    ) -> GenerationCore:
        """Serve the model; the load is over."""

    async def show_health(self) -> None:
        """Show SERVING."""

    async def give_up(self) -> None:
        """Free what the load took, and the place."""


class ModelLoad:
    """A load, which holds the process's place for a model until `end`. Belongs to one event loop."""

    def __init__(self, place: LoadingHolder, order: LoadOrder, metrics: LoadMetrics) -> None:
        """Check what needs no file, and make the folder for files that will come.

        Raises InvalidArgument naming the field, FailedPrecondition (MODEL_ROOT_OFF, MODEL_FOLDER), ResourceExhausted.
        """
        self._place = place
        self._order = order
        self._metrics = metrics
        self._began = time.monotonic()
        self._progress = CancellableProgress()
        self._folder: UploadFolder | None = None
        self._field = _FILES_FIELD if order.path is None else _PATH_FIELD
        # Places of this machine that are no caller's business.
        self._private: list[str] = []
        # The thread's work that is under way, and the whole of it from the last byte on.
        self._step: asyncio.Future[Any] | None = None
        self._work: asyncio.Task[GenerationCore] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_done = False
        self._outcome = "cancelled"
        self._config = self._configured(place.config)
        self.name = self._config.served_model_name[0]
        if _NAME.fullmatch(self.name) is None:
            raise InvalidArgument("start.name", "must be 1 to 128 letters, digits and ./:@_-")
        if order.path is None:
            self._folder = self._upload_folder(place.config)
            self._private.append(str(self._folder.path))
        elif place.config.model_root is None:
            raise FailedPrecondition(
                "this process loads from no path (--model-root): send the files' bytes", reason="MODEL_ROOT_OFF"
            )

    @property
    def wants_bytes(self) -> bool:
        """True until every announced file is whole."""
        return self._folder is not None and not self._folder.is_whole

    @property
    def received(self) -> StageProgress:
        """Progress of the bytes."""
        done, total = (0, 0) if self._folder is None else (self._folder.received_bytes, self._folder.total_bytes)
        return StageProgress(RECEIVE, self.name, done, total, ended=not self.wants_bytes)

    async def take(self, name: str, data: bytes) -> None:
        """Take the next bytes of the file `name`. Raises as `UploadFolder.write`, and for a config.json that is wrong,
        or describes a model that does not fit."""
        folder = self._folder
        if folder is None:
            raise InvalidArgument("chunk", "comes with a start.upload only")
        complete = await self._on_thread(partial(folder.write, name, data))
        self._metrics.received_bytes.inc(len(data))
        if complete == CONFIG_FILE:
            await self._on_thread(partial(self._check_config, folder.path))

    def cut_short(self) -> None:
        """Note that no more bytes come. Raises InvalidArgument naming the file that lacks some."""
        self._outcome = "refused"
        if self._folder is not None:
            self._folder.require_whole()

    async def finish(self, show: ShowProgress) -> GenerationCore:
        """Load and serve the model. `show` gets the progress, on other threads.

        Raises InvalidArgument MODEL_REFUSED for files that are no model, or naming the option that cannot be honoured;
        ResourceExhausted MODEL_TOO_LARGE; Internal LOAD_FAILED.
        """
        self._progress.show = show
        self._work = asyncio.create_task(self._run())
        return await asyncio.shield(self._work)

    async def end(self) -> None:
        """Give the place back, unless the model is served. Cancels what is under way, and returns when all of it is
        freed."""
        if self._is_done:
            return
        if self._ending is None:
            self._progress.cancel()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        under_way = [one for one in (self._step, self._work) if one is not None]
        # Its caller may be gone: exceptions are marked as seen.
        await asyncio.gather(*under_way, return_exceptions=True)
        del under_way
        if self._is_done:
            return
        self._step = self._work = None
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)
        self._metrics.ends[self._outcome].inc()
        _log.info("not loaded", model=self.name, outcome=self._outcome)
        await self._place.give_up()
        self._is_done = True

    async def _run(self) -> GenerationCore:
        config, root = self._config, self._place.config.model_root
        try:
            if self._folder is not None:
                path = self._folder.path
            else:
                top, path = await asyncio.to_thread(folder_below, root or "", self._order.path or "")
                self._private.append(str(top))
            config = replace(config, model=str(path))
            loaded = await asyncio.wrap_future(self._place.load_on_thread(config, self._progress))
            if self._folder is not None:
                await asyncio.to_thread(self._folder.drop_weights)
            if self._ending is None:
                core = self._place.begin(loaded, config, self._began, self._folder)
                self._is_done = True
                await self._place.show_health()
                return core
            refusal: PenstockError = _cancelled()
        except StartCancelled:
            refusal = _cancelled()
        except (StartupError, PenstockError) as error:
            refusal = self._refused(error)
        except Exception as error:  # whatever files made it raise, the process goes on
            self._outcome = "failed"
            _log.exception("a model could not be loaded", model=self.name)
            what = type(error).__name__
            refusal = Internal(f"the load broke ({what}); the log has the cause", reason="LOAD_FAILED")
        # Outside of the handlers: the error would otherwise keep the other one, and its frames the weights.
        raise refusal

    async def _on_thread(self, call: Callable[[], T]) -> T:
        """Do a step of the arrival; `end` waits for it. Raises its errors as the caller's."""
        step = asyncio.get_running_loop().run_in_executor(None, call)
        self._step = step
        try:
            return await asyncio.shield(step)
        except (StartupError, PenstockError) as error:
            refusal = self._refused(error)
        raise refusal

    def _check_config(self, folder: Path) -> None:
        """Refuse a model that does not fit before its weights come. Raises StartupError."""
        stored = sum(file.num_bytes for file in self._order.files if file.name.endswith(WEIGHTS_SUFFIX))
        available = open_device(self._config.device).memory().available
        model = read_model_config(folder, self._config.route)
        is_as_stored = model.route == "fallback"
        check_weights(stored, None if is_as_stored else model, self._config.quantization, available)

    def _configured(self, config: GenerationServiceConfig) -> GenerationServiceConfig:
        """Return the configuration of this load. Raises InvalidArgument naming the option."""
        order = self._order
        own = "" if order.path is None else Path(order.path).name
        name = order.name or (*config.served_model_name, own)[0]
        made = replace(config, empty=False, served_model_name=(name,), **order.overrides)
        try:
            made.validate()
        except StartupError as error:
            refusal = self._refused(error)
        else:
            return made
        raise refusal

    def _upload_folder(self, config: GenerationServiceConfig) -> UploadFolder:
        limits = UploadLimits(config.max_model_bytes, config.max_model_files, config.max_model_text_bytes)
        parent = upload_parent(config.model_upload_folder)
        available = open_device(config.device).memory().available
        check_files(self._order.files, limits, available, free_disk(parent))
        return UploadFolder(parent, self._order.files, limits)

    def _refused(self, error: StartupError | PenstockError) -> PenstockError:
        """Return an error of the files or options as the caller's."""
        self._outcome = "refused"
        if isinstance(error, PenstockError):
            return error
        text = error.message
        for place in self._private:
            text = text.replace(f"{place}/", "").replace(place, "the folder")
        text = text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"
        option = (error.flag or "").removeprefix("--").replace("-", "_")
        where = f"start.options.{option}" if option in self._order.overrides else self._field
        if isinstance(error, DoesNotFit):
            return ResourceExhausted(text, reason="MODEL_TOO_LARGE", field=where)
        reason = "MODEL_REFUSED" if where == self._field else "INVALID_FIELD"
        return InvalidArgument(where, text, reason=reason)


def _cancelled() -> Cancelled:
    return Cancelled("the load was cancelled", reason="LOAD_CANCELLED")


def folder_below(root: str, path: str) -> tuple[Path, Path]:
    """Return the root and the folder or GGUF file that `path`, absolute or relative to it, leads to; without links.

    Raises InvalidArgument unless it and every file in it lie below `root`, links followed. The answer does not tell
    what there is elsewhere. Who can write below the root could change a link afterwards: that is the owner's business.
    """

    def refusal(why: str) -> InvalidArgument:
        # Both are known to the caller: its own path, and where it is looked for.
        return InvalidArgument(_PATH_FIELD, f"{path!r} {why} --model-root {root}", reason="MODEL_REFUSED")

    try:
        top = Path(root).expanduser().resolve(strict=True)
        folder = (top / path).resolve(strict=True)
        is_gguf = folder.suffix == SUFFIX and folder.is_file()
        if not folder.is_relative_to(top) or not (folder.is_dir() or is_gguf):
            raise refusal("is no folder below")
        for entry in existing_parts(folder) if is_gguf else folder.iterdir():
            target = entry.resolve(strict=True)
            if not target.is_relative_to(top):
                raise refusal("has a link that leaves")
            # Opening a pipe or a device may never return.
            kind = target.stat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise refusal("has something that is no file, below")
    except (OSError, ValueError, RuntimeError):
        raise refusal("is no folder below") from None
    return top, folder
