"""SAIL's levels of logging, as Python's loggers have them."""

from __future__ import annotations

import enum
import logging


class LogLevel(enum.Enum):
    """Levels of `set_loglevel`, by SAIL's names, as Python's logging has them."""

    TRACE = 5
    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARN = logging.WARNING
    ERR = logging.ERROR
    CRITICAL = logging.CRITICAL
    OFF = logging.CRITICAL + 10


def set_loglevel(loglevel: LogLevel) -> int:
    """Let Python's loggers of penstock and its client log from this level on; returns 0."""
    try:
        level = LogLevel(loglevel)
    except ValueError:
        names = ", ".join(f"LogLevel.{one.name}" for one in LogLevel)
        raise ValueError(f"loglevel: must be one of {names}") from None
    for name in ("penstock", "penstock_client"):
        logging.getLogger(name).setLevel(level.value)
    return 0
