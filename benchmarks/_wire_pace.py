"""The pace at which a backend of benchmarks/wire.py emits: the same flags and the same rule for each kind of
backend."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

# Seconds to wait for the client when every request has its window full.
_POLL_SECONDS = 0.00005


@dataclass(frozen=True, slots=True)
class Pace:
    """A request is given its next tokens only when fewer than `window` are on their way to the client; 0: always."""

    window: int
    interval: int
    step_seconds: float
    poll_seconds: float = _POLL_SECONDS

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Pace:
        """Return the pace that the flags of `add_backend_flags` ask for."""
        return cls(arguments.window, arguments.interval, arguments.step_seconds)


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every kind of backend."""
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True, help="the process that this one ends with")
    parser.add_argument("--counters", type=Path, required=True, help="file of a 64-bit counter for each slot")
    parser.add_argument("--ids", type=json.loads, required=True, help="the answer: a JSON list")
    parser.add_argument("--window", type=int, default=0, help="tokens on their way to the client; 0: any number")
    parser.add_argument("--interval", type=int, default=1, help="tokens of a delta, as with stream_interval")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="least time between steps")
