"""Download of a model from the Hugging Face hub, with its progress. Importing huggingface_hub takes half a second, so
only processes that need it import this module.

If several processes want the same model, one downloads and the others wait: each byte comes once, and one of them can
report the progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import logging as hub_logging
from tqdm.std import tqdm  # type: ignore[import-untyped]

from penstock.common.environment import hub_cache_folder
from penstock.common.progress import DOWNLOAD, WAIT, ProgressStage, ShowProgress

# Seconds between two checks of the process that downloads.
WAIT_SECONDS = 0.2
# The only folder of a repository that serving reads.
_TEMPLATES = "additional_chat_templates/"


class ConnectionLost(OSError):
    """A connection broke repeatedly during a file. The received bytes stay, and the next try continues after them."""


def serving_files(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the files of a repository that serving needs: those of `patterns` at its top, and chat templates.

    Weights under a second name, which some owners add for their own programs, are left out.
    """
    known = list(patterns)
    found = [
        name
        for name in names
        if ("/" not in name or name.startswith(_TEMPLATES)) and any(fnmatch(name, pattern) for pattern in known)
    ]
    has_own = any(name.startswith("model") and name.endswith(".safetensors") for name in found)
    return [name for name in found if not (has_own and fnmatch(name, "consolidated*.safetensors*"))]


def download(
    repo: str, revision: str | None, patterns: list[str], show: ShowProgress, *, ask_seconds: float, is_hub_off: bool
) -> Path:
    """Return the folder of a snapshot in the hub's cache, after downloading the missing files of `patterns`.

    The hub has `ask_seconds` to list its files; after that, and with `is_hub_off`, only the cache is used. Raises
    huggingface_hub's errors and OSError, ConnectionLost among them.
    """

    def snapshot(files: list[str] = patterns, **settings: Any) -> Path:
        try:
            return Path(snapshot_download(repo, revision=revision, allow_patterns=files, **settings))
        except Exception as error:
            # Classes of huggingface_hub's HTTP library, which differs between its releases.
            if type(error).__module__.startswith("httpx") and not isinstance(error, OSError):
                raise ConnectionLost(str(error)) from error
            raise

    # Its warnings name addresses that may hold a signature; a lasting problem is an error here.
    hub_logging.set_verbosity(logging.ERROR)
    if is_hub_off:
        return snapshot(local_files_only=True)
    try:
        # snapshot_download itself would retry for as long as the system's connections take.
        info = HfApi().model_info(repo, revision=revision, timeout=ask_seconds, files_metadata=True)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # errors of the connection; their classes are the HTTP library's
        return snapshot(local_files_only=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = serving_files(sizes, patterns)
    wanted = {name: sizes[name] for name in names}

    def missing() -> dict[str, int]:
        is_cached = {name: try_to_load_from_cache(repo, name, revision=info.sha) for name in wanted}
        return {name: size for name, size in wanted.items() if not isinstance(is_cached[name], str)}

    if not missing():
        return snapshot(names)
    with contextlib.ExitStack() as held:
        held.enter_context(_only_process(repo, lambda: ProgressStage(show, WAIT, repo)))
        lacking = missing()
        # None are left if another process has downloaded them meanwhile.
        if lacking:
            total = sum(lacking.values())
            stage = held.enter_context(ProgressStage(show, DOWNLOAD, repo, total=total))
            return snapshot(names, tqdm_class=_byte_bars(stage, total, lambda: total - sum(missing().values())))
        return snapshot(names)


@contextlib.contextmanager
def _only_process(repo: str, waiting: Callable[[], ProgressStage]) -> Iterator[None]:
    """Lock `repo` so that only this process downloads it; `waiting` is the stage to show until then.

    The lock ends with its process. A cache that cannot be locked, such as a read-only one, has none.
    """
    folder = Path(hub_cache_folder()) / ".locks" / f"models--{repo.replace('/', '--')}"
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "penstock.lock", os.O_RDWR | os.O_CREAT, 0o664)
            if not _take(descriptor):
                with waiting() as stage:
                    while not _take(descriptor):
                        time.sleep(WAIT_SECONDS)
                        stage.count(0, 0)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take the lock; False when another process has it. Raises OSError if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _byte_bars(stage: ProgressStage, total: int, in_files: Callable[[], int]) -> type[tqdm]:
    """Make the class of bars for snapshot_download: they draw nothing and count for `stage`.

    Releases of huggingface_hub differ in their bars: one counts files, and received and written bytes have one bar
    each, one together, or none. The highest is shown; `in_files` returns the bytes of complete files.
    """
    counted: dict[int, float] = {}
    lock = threading.RLock()

    class ByteBar(tqdm):  # type: ignore[misc]
        # No monitor thread.
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            with lock:
                counted[id(self)] = self.n if self._counts_bytes else in_files()
                stage.count(int(max(counted.values())), total)
            return result

    # The lock by default is for processes, and starts one of its own.
    ByteBar.set_lock(lock)
    return ByteBar
