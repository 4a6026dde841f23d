"""Files and batches of one gateway: store and runner, made from its configuration."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.http_errors import HttpError
from penstock.gateway.job_rights import JobRights
from penstock.gateway.metrics import GatewayMetrics
from penstock.jobs.batch_runner import Answerer, BatchRunner
from penstock.jobs.batch_store import BatchStore
from penstock.jobs.file_store import FileStore
from penstock.jobs.job_database import open_job_database
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import JobCounts
from penstock.jobs.start_pace import StartPace


class Jobs:
    """Store and runner, as the routes and the process's life use them."""

    def __init__(
        self, options: JobOptions, metrics: GatewayMetrics, answer: Answerer, rights: JobRights, max_line_bytes: int
    ) -> None:
        """Make them; nothing is open yet. Raises StartupError naming --job-store."""
        self._options, self.rights = options, rights
        self._database = open_job_database(options.job_store, options.job_store_seconds)
        self._uploads, self._made_at = Counter[str](), time.time()
        self._max_uploads_of_owner = max(1, int(options.files_share * options.max_uploads))
        self.files = FileStore(self._database, options)
        self.batches = BatchStore(self._database, self.files, options)
        # Callers of the routes that answer are there.
        self.pace = StartPace(options.job_starts_per_second, options.job_quiet_seconds)

        def show(counts: JobCounts) -> None:
            metrics.files.set(counts.files)
            metrics.file_bytes.set(counts.file_bytes)
            metrics.batches.set(counts.batches)
            metrics.batch_lines_waiting.set(counts.waiting_lines)

        def count(outcome: str) -> None:
            metrics.batch_lines(outcome).inc()

        self.runner = BatchRunner(
            self.files,
            self.batches,
            options,
            answer,
            max_line_bytes=max_line_bytes,
            count=count,
            show=show,
            pace=self.pace,
        )
        metrics.batch_lines_in_flight.set_function(lambda: self.runner.in_flight)

    async def open(self) -> None:
        """Open the store. Raises StartupError naming --job-store."""
        await self._database.open()
        if self._database.is_own:
            # What a process before this one had taken, or received in part: nobody else gives it back.
            await self.batches.release_all(None)
            await self.files.sweep(self._made_at)

    def start(self) -> None:
        """Begin to answer lines."""
        self.runner.start()

    async def close(self) -> None:
        """Give up the lines in flight, and close the store."""
        await self.runner.stop()
        await self._database.close()

    @contextmanager
    def uploading(self, owner: str) -> Iterator[None]:
        """Hold a place for an upload of a caller during the block. Raises HttpError 429."""
        has_most = self._uploads[owner] >= self._max_uploads_of_owner
        if has_most or self._uploads.total() >= self._options.max_uploads:
            flag = "--files-share of --max-uploads" if has_most else "--max-uploads"
            raise HttpError(
                429, f"other files arrive at this moment ({flag})", reason="MAX_REQUESTS", retry_after_seconds=1.0
            )
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]
