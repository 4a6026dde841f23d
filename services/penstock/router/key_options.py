"""Every bound and default of keys and of their ledger. The router's configuration inherits them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option
from penstock.database.transactions import TEMPORARY

KEYS = "Keys and quotas"


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Knobs of keys."""

    keys_file: str | None = option(
        None,
        "File of keys (TOML): callers must send one of them as bearer token. Each key has scopes, models, rates, "
        "tokens a day and an expiry of its own (docs/guide/keys.md). It is read again when it changes, and on SIGHUP. "
        "Rates count in each process of a router, tokens a day in the ledger. Tokens of --auth-token-file are accepted "
        "beside keys, without bounds.",
        group=KEYS,
        metavar="FILE",
    )
    max_keys: int = option(1024, "Keys of the file.", group=KEYS, minimum=1)
    keys_interval_seconds: float = option(
        1.0, "Interval between looks at the file of keys, for changes.", group=KEYS, minimum=0.05
    )
    ledger: str = option(
        TEMPORARY,
        "Place of the ledger of what keys used: temporary (it ends with the process), a folder that outlives the "
        "process (SQLite; for the routers of one machine), or a PostgreSQL database that routers of several machines "
        "share (postgresql://HOST/DATABASE; put an address with a password into PENSTOCK_LEDGER).",
        group=KEYS,
        metavar="temporary|FOLDER|URL",
    )
    ledger_seconds: float = option(
        10.0,
        "Time for a connection to PostgreSQL, and for one transaction; a server that says nothing for so long is given "
        "up, and asked again over a new connection. Requests with keys wait for it.",
        group=KEYS,
        minimum=0.1,
    )
    ledger_lease_seconds: float = option(
        15.0,
        "A router that did not show for this long that it lives is dead: its unfinished answers are taken for lost, "
        "and keep all of their reservations. Clocks of routers that share a ledger must agree better than this.",
        group=KEYS,
        minimum=0.3,
    )
    ledger_wait_seconds: float = option(
        5.0,
        "Longest time that the end of an answer waits until the ledger has it. Then the caller gets it, and the ledger "
        "later.",
        group=KEYS,
        minimum=0.0,
    )
    ledger_entry_days: int = option(
        35, "Days for which the ledger keeps an entry for each answer. Sums by key and day stay.", group=KEYS, minimum=1
    )
    max_ledger_waiting: int = option(
        4096,
        "Reservations and ends that wait for the ledger; at this number, requests with keys are refused.",
        group=KEYS,
        minimum=16,
    )
