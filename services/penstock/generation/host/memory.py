"""Memory of this process's machine or container, and sizing of the KV pool. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.common.errors import StartupError
from penstock.common.units import format_size

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
# `auto` takes this share of the memory after the weights; the rest is for activations and other processes.
AUTO_FRACTION = 0.6
# Size -1: what is left of this share of the whole memory.
REST = -1
REST_FRACTION = 0.8


def parse_memory(text: str, *, flag: str = "--kv-memory") -> int | None:
    """Parse `2GiB`, `512MB` or `1073741824` into bytes; None for `auto`, REST for `-1`. Raises StartupError naming
    `flag`."""
    if text.strip().lower() == "auto":
        return None
    if text.strip() == str(REST):
        return REST
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise StartupError(
            f"{flag} must be `auto`, a size such as 2GiB or 512MB, or -1: what is left of {REST_FRACTION:.0%} of the "
            "memory",
            flag=flag,
        )
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_weights(num_bytes: int, mapped_bytes: int) -> str:
    """Format bytes as `1.5 GiB, 260 MiB of it mapped`, for people."""
    if mapped_bytes in (0, num_bytes):
        return f"{format_size(num_bytes)}{' mapped' if mapped_bytes else ''}"
    return f"{format_size(num_bytes)}, {format_size(mapped_bytes)} of it mapped"


def kv_pool_blocks(
    memory: int | None,
    *,
    bytes_per_block: int,
    blocks_of_context: int,
    available: int,
    max_context_tokens: int,
    max_blocks: int | None = None,
    total: int = 0,
    flag: str = "--kv-memory",
    after: str = "the weights",
) -> int:
    """Return the number of blocks in `memory` bytes; None (`auto`): in AUTO_FRACTION of `available`, at most
    `max_blocks`; REST: in the rest of REST_FRACTION of `total`. A sequence of `max_context_tokens` has
    `blocks_of_context`.

    Raises StartupError naming `flag` when not one block fits, or when `memory` is more than is `available` `after` the
    weights, or after another pool.
    """
    needed = blocks_of_context * bytes_per_block
    advice = (
        f"one block takes {format_size(bytes_per_block)}, one sequence of the whole context "
        f"({max_context_tokens} tokens) {format_size(needed)}"
    )
    if memory is not None and memory != REST and memory > available:
        raise StartupError(
            f"{flag} {format_size(memory)} is more than the {format_size(max(available, 0))} left after "
            f"{after}: {advice}",
            flag=flag,
        )
    budget = memory if memory is not None else int(max(available, 0) * AUTO_FRACTION)
    if memory == REST:
        budget = max(available - int((1 - REST_FRACTION) * total), 0)
    blocks = budget // bytes_per_block
    if memory is None and max_blocks is not None:
        blocks = min(blocks, max_blocks)
    if blocks < 1:
        given = flag
        if memory is None:
            given = f"{flag} auto, of what is left after {after},"
        elif memory == REST:
            given = f"{flag} -1, what is left of {REST_FRACTION:.0%} of {format_size(total)} after {after},"
        raise StartupError(f"{given} {format_size(budget)} holds no KV block: {advice}", flag=flag)
    return blocks


def host_memory(root: Path = Path("/"), *, mapped: int = 0) -> tuple[int, int]:
    """Return (total, available) bytes: the machine's, or the tightest enclosing cgroup's if that is less.

    `mapped` bytes of files must stay in memory; the system counts them as available as long as no other process needs
    the memory.
    """
    total, available = _meminfo(root / "proc/meminfo")
    available -= mapped
    for limit, used in _cgroup_limits(root, mapped):
        total = min(total, limit)
        available = min(available, limit - used)
    return total, max(available, 0)


def _meminfo(path: Path) -> tuple[int, int]:
    if not path.is_file():  # not Linux: how much is in use is not asked
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])


def _cgroup_limits(root: Path, mapped: int) -> list[tuple[int, int]]:
    """Return (limit, used) of every cgroup, v1 or v2, that encloses this process.

    `used` is without reclaimable file pages, but with `mapped` bytes of them.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit_name, used_name, prefix = "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, limit_name, used_name = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = root / mount / Path(*parts[:depth])
            limit = _number(folder / limit_name)
            used = _number(folder / used_name)
            if limit is not None and used is not None:
                inactive, active = (
                    _stat(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("inactive", "active")
                )
                # Pages of mapped files are active or inactive. Active ones are in `used` already and count once.
                limits.append((limit, used - inactive + max(0, mapped - active)))
    return limits


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit there
        return None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def resident_bytes() -> int:
    """Return the memory of this process (resident, with pages of files); 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
