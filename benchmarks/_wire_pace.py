"""When a backend of benchmarks/wire.py emits: the same flags and the same rule for each kind of backend."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

# How long to wait for the client when every request has its window full.
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
        """From `add_pace_flags`."""
        return cls(arguments.window, arguments.interval, arguments.step_seconds)


def add_pace_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a backend."""
    parser.add_argument("--window", type=int, default=0, help="tokens on their way to the client; 0: any number")
    parser.add_argument("--interval", type=int, default=1, help="tokens of a delta, as with stream_interval")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="least time between steps")
