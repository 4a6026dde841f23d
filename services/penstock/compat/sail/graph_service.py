"""A model opened as graphs in this process, for an EngineLLM that is told no server: a folder, a GGUF file, or a tar.

It is the generation service itself, on an event loop and a thread of its own, on a free port of the loopback address.
Several may live beside each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import tarfile
import tempfile
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.common.environment import current_environment, prepare_environment
from penstock.common.errors import FailedPrecondition, StartupError
from penstock.common.logging import configure_quiet_logging
from penstock.common.options import load as load_options
from penstock.common.options import options_of
from penstock.generation.config import GenerationServiceConfig

_GGUF = b"GGUF"
_OPENED = "archive"


class GraphService:
    """A running service of one model; close it. `address` is where it listens."""

    def __init__(self, model: str | bytes, **options: Any) -> None:
        """Load `model`: a path, or the bytes of a tar archive or a GGUF file. `options` are those of `penstock serve
        generation` by their fields' names.

        Raises FileNotFoundError and FailedPrecondition naming the path, StartupError naming the option.
        """
        prepare_environment()
        configure_quiet_logging()
        self._scratch: Path | None = None
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        try:
            path = self._path_of(model)
            self._thread = threading.Thread(target=self._loop.run_forever, name="graphs", daemon=True)
            self._thread.start()
            self.address: str = asyncio.run_coroutine_threadsafe(self._begin(path, options), self._loop).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the service, and remove what was unpacked. Calling it again is harmless."""
        thread, self._thread = self._thread, None
        if thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    async def _begin(self, path: Path, options: dict[str, Any]) -> str:
        from penstock.generation.app import GenerationApp
        from penstock.serving.server import serve_in_process

        known = {bound.name: bound.env for bound in options_of(GenerationServiceConfig)}
        environment = {name: value for name, value in current_environment().items() if name in known.values()}
        given = {"model": str(path), "host": "127.0.0.1", "port": 0, "metrics_port": 0, **options}
        config = load_options(GenerationServiceConfig, given, environment)
        config.validate()
        registry = CollectorRegistry()
        self._life = contextlib.AsyncExitStack()
        running = await self._life.enter_async_context(
            serve_in_process(GenerationApp(config, registry), config, registry)
        )
        return running.address

    async def _end(self) -> None:
        life = getattr(self, "_life", None)
        if life is not None:
            await life.aclose()

    def _path_of(self, model: str | bytes) -> Path:
        """Return the folder or GGUF file, unpacked where it is an archive."""
        if isinstance(model, bytes):
            return self._unpacked(io.BytesIO(model), "the bytes")
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        if not path.is_file():
            raise FileNotFoundError(
                f"model: {model} is no folder and no file (from {Path.cwd()}), and no server is told to look for it "
                "below its --model-root: EngineLLM(..., address='HOST:PORT')"
            )
        with path.open("rb") as file:
            return self._unpacked(file, str(model), path)

    def _unpacked(self, file: Any, name: str, path: Path | None = None) -> Path:
        magic = file.read(len(_GGUF))
        file.seek(0)
        if magic == _GGUF and path is not None and path.suffix == ".gguf":
            return path
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-graphs-"))
        target = self._scratch / _OPENED
        if magic == _GGUF:
            target = target.with_suffix(".gguf")
            with target.open("wb") as made:
                shutil.copyfileobj(file, made)
            return target
        target.mkdir()
        try:
            with tarfile.open(fileobj=file) as archive:
                for member in archive:
                    opened = archive.extractfile(member) if member.isfile() else None
                    if opened is not None:
                        # Folders in the archive do not matter: names are plain.
                        with (target / PurePosixPath(member.name).name).open("wb") as made:
                            shutil.copyfileobj(opened, made)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise FailedPrecondition(
                f"model: {name} is neither a GGUF file nor a tar archive of a folder (EngineLLM.archive makes one)",
                reason="MODEL_REFUSED",
            ) from error
        if not (target / "config.json").is_file():
            raise FailedPrecondition(f"model: {name} has no config.json in its archive", reason="MODEL_REFUSED")
        return target


def open_graphs(model: str | bytes, **options: Any) -> GraphService:
    """Open a model in this process. Raises as GraphService, with a StartupError as FailedPrecondition."""
    try:
        return GraphService(model, **options)
    except StartupError as error:
        raise FailedPrecondition(f"model: {error}", reason="MODEL_REFUSED") from error
