"""Resident memory of each process at rest, on the embedded model. Figures in MB (10^6 bytes).

python -m benchmarks memory --out memory.json
"""

from __future__ import annotations

import argparse
from typing import Any

import psutil
from factories.servers.stack import Process, Stack
from penstock_client import Client

from benchmarks._report import Report


def resident(process: Process) -> dict[str, float]:
    """RSS of the process, and RSS and PSS summed over it and its children."""
    root = psutil.Process(process.popen.pid)
    family = [root, *root.children(recursive=True)]
    return {
        "rss_mb": root.memory_info().rss / 1e6,
        "tree_rss_mb": sum(one.memory_info().rss for one in family) / 1e6,
        "tree_pss_mb": sum(one.memory_full_info().pss for one in family) / 1e6,
        "processes": len(family),
    }


def measure(kv_memory: str) -> dict[str, Any]:
    """Start a stack, answer one chat so that nothing is lazy any more, and read each process."""
    with Stack(generation_flags=("--kv-memory", kv_memory)) as stack:
        with Client(stack.address) as client:
            client.generate([{"role": "user", "content": "Hello!"}], max_new_tokens=16)
        return {process.name: resident(process) for process in stack.processes}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--kv-memory", default="64MiB", help="size of the KV pool, part of the generation figure")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    results = measure(arguments.kv_memory)
    report.write({"settings": {"kv_memory": arguments.kv_memory}, "resident": results})
