"""Watch over the file of models: it is read again when it changes, or when an operator asks for that."""

from __future__ import annotations

import asyncio

from penstock.common.errors import FailedPrecondition, StartupError
from penstock.common.logging import get_logger
from penstock.router.config import RouterConfig
from penstock.router.frontend.route_table import AppliedFile, RouteTable
from penstock.router.models_file import ModelsFile, read_models

_log = get_logger("penstock.router")


class ModelsWatch:
    """Watch over one file. Belongs to one event loop; files are read on a thread."""

    def __init__(self, config: RouterConfig, table: RouteTable) -> None:
        assert config.models is not None
        self._path = config.models
        self._max_models = config.max_models
        self._interval_seconds = config.models_interval_seconds
        self._table = table
        # What was read last; None: it was wrong.
        self._file: ModelsFile | None = None
        self._problem = ""
        self._applying = asyncio.Lock()

    async def read(self) -> ModelsFile:
        """Read the file at the start. Raises StartupError."""
        self._file = await asyncio.to_thread(read_models, self._path, self._max_models)
        return self._file

    async def run(self) -> None:
        """Look for changes until cancelled. A wrong file is told once, and changes nothing."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                async with self._applying:
                    await self._apply()
                self._problem = ""
            except StartupError as error:
                if error.message != self._problem:
                    self._problem = error.message
                    _log.error("models served as before: the file is wrong", cause=error.message)

    async def reload(self) -> AppliedFile:
        """Read the file now. Raises FailedPrecondition MODELS_FILE when it is wrong: nothing is changed then."""
        try:
            async with self._applying:
                return await self._apply()
        except StartupError as error:
            raise FailedPrecondition(error.message, reason="MODELS_FILE") from error

    async def _apply(self) -> AppliedFile:
        file = await asyncio.to_thread(read_models, self._path, self._max_models)
        if file == self._file:
            return AppliedFile()
        applied = await self._table.apply(file)
        # A model that failed to start is tried again.
        self._file = None if applied.failed else file
        _log.info("models changed", added=applied.added, changed=applied.changed, removed=applied.removed)
        return applied
