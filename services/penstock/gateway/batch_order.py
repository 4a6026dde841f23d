"""Order of a batch as a caller gives it, over HTTP or gRPC: checked, with the names that both APIs have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.common.units import parse_duration
from penstock.gateway.caller_metadata import read_metadata
from penstock.gateway.config import GatewayConfig
from penstock.gateway.places import ANYBODY
from penstock.jobs.job_records import ENDPOINTS

USUAL_WINDOW = "24h"
_DAYS = re.compile("([0-9]{1,4})d")
_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Facts of a batch to make. `seconds`: its completion window."""

    endpoint: str
    window: str
    seconds: float
    metadata: dict[str, str]


def checked_order(
    config: GatewayConfig, tenant: str, *, endpoint: Any, window: str, metadata: Mapping[str, Any]
) -> BatchOrder:
    """Check a caller's batch. `tenant`: as Caller's.

    Raises InvalidArgument naming a field, and FailedPrecondition NO_JOB_TOKEN.
    """
    if endpoint not in ENDPOINTS:
        raise InvalidArgument("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    order = BatchOrder(endpoint, window, _seconds(window, config.max_batch_seconds), read_metadata(metadata))
    if tenant != ANYBODY and not (config.job_token_file or config.channel_token_file):
        raise FailedPrecondition(
            "the router asks for tokens, and this gateway has none for the lines of batches (--job-token-file)",
            reason="NO_JOB_TOKEN",
        )
    return order


def _seconds(window: str, most: float) -> float:
    """Return a completion_window in seconds. Raises InvalidArgument."""
    try:
        days = _DAYS.fullmatch(window)
        seconds = int(days[1]) * _DAY_SECONDS if days else parse_duration(window)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= most:
        raise InvalidArgument(
            "completion_window", f"must be a duration such as 24h, at most {most:g} s (--max-batch-seconds)"
        )
    return seconds
