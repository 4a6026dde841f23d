"""Every bound and default of files and batches. The gateway's configuration inherits them, with flags and page."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option
from penstock.database.transactions import TEMPORARY

JOBS = "Files and batches"
OFF = "off"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Knobs of files and batches."""

    job_store: str = option(
        TEMPORARY,
        "Place of files and batches: temporary (a file of SQLite that ends with the process), off, a folder that "
        "outlives the process and belongs to one gateway (SQLite), or a PostgreSQL database that several gateways "
        "share (postgresql://HOST/DATABASE; put an address with a password into PENSTOCK_JOB_STORE).",
        group=JOBS,
        metavar="temporary|off|FOLDER|URL",
    )
    job_store_seconds: float = option(
        30.0,
        "Time for a connection to PostgreSQL, and for one transaction; a server that says nothing for so long is given "
        "up, and asked again over a new connection.",
        group=JOBS,
        minimum=0.1,
    )
    job_token_file: str | None = option(
        None,
        "The lines of batches go to a router that asks for tokens with the first bearer token of this file. Callers "
        "with a token of their own can make batches only with it, or with --channel-token-file. Where the router has "
        "keys, the lines count for the caller's key: the token must be one of the router's --auth-token-file, or a key "
        "with the scope delegate.",
        group=JOBS,
        metavar="FILE",
    )
    job_requests: int = option(16, "Lines of batches that are with the router at once.", group=JOBS, minimum=1)
    job_starts_per_second: float = option(
        10.0,
        "Lines of batches that start in a second while callers of this gateway are there: more would fill the "
        "processors that callers wait for. 0: any number. Raise it where a gateway has many backends.",
        group=JOBS,
        minimum=0.0,
    )
    job_quiet_seconds: float = option(
        5.0, "Time after the last caller in which that still holds.", group=JOBS, minimum=0.0
    )
    max_file_bytes: int = option(200 << 20, "Largest file of a caller.", group=JOBS, minimum=1024)
    max_files_bytes: int = option(
        10 << 30, "Bytes of all files together, answers of batches among them.", group=JOBS, minimum=1024
    )
    max_files: int = option(10_000, "Files of all callers together.", group=JOBS, minimum=1)
    files_share: float = option(
        0.5,
        "Share of --max-files, --max-files-bytes, --max-batches and --max-uploads that one caller may have. Callers "
        "are told apart by their authorization header.",
        group=JOBS,
        minimum=0.01,
        maximum=1.0,
    )
    file_seconds: float = option(
        30 * 86400.0, "Time after which a file, and a batch that has ended, is removed.", group=JOBS, minimum=1.0
    )
    max_uploads: int = option(4, "Files that arrive at once; more are refused with 429.", group=JOBS, minimum=1)
    upload_seconds: float = option(600.0, "Time for a file to arrive.", group=JOBS, minimum=1.0)
    max_batches: int = option(100, "Batches in progress; more are refused with 429.", group=JOBS, minimum=1)
    max_batch_lines: int = option(50_000, "Lines of one batch.", group=JOBS, minimum=1)
    max_batch_seconds: float = option(
        7 * 86400.0, "Longest completion_window of a batch; at its end the rest expires.", group=JOBS, minimum=1.0
    )
    job_lease_seconds: float = option(
        60.0,
        "A line that a gateway took and neither answered nor renewed for this long is taken by another one. Clocks of "
        "gateways that share a database must agree better than this.",
        group=JOBS,
        minimum=1.0,
    )
    job_poll_seconds: float = option(
        1.0,
        "Interval at which a gateway looks for work and for batches that expired. While there is no batch, it looks "
        "ever less often, at last every 16th time; a batch that this gateway makes begins at once.",
        group=JOBS,
        minimum=0.01,
    )

    @property
    def has_jobs(self) -> bool:
        """False when files and batches are off."""
        return self.job_store != OFF
