"""Limits that a child process sets on itself before it runs foreign code, such as a chat template."""

from __future__ import annotations

import resource

from penstock.common.heap import free_heap_bytes


def limit_memory(headroom_bytes: int) -> None:
    """Allow this many bytes of address space beyond those in use."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    # Free memory inside the heap escapes the limit; after a large load that is tens of megabytes.
    limit = mapped + headroom_bytes - free_heap_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """Make the kernel end this process after this many more seconds of CPU time, even without its parent.

    The kernel counts whole seconds, so it may take up to one more.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
