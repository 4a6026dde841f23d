"""Limits that a child process puts on itself before it takes work that somebody else wrote."""

from __future__ import annotations

import resource


def limit_memory(headroom_bytes: int) -> None:
    """Allow this much address space beyond what is mapped now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + headroom_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process once it has used this much more CPU, whatever became of the parent.

    In whole seconds, so up to one more.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
