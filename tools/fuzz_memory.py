"""Memory of the stack's processes under random requests, and how much of it is the KV pool.

    python tools/fuzz_memory.py --requests 60000 --kv-memory 512MiB --router-only

Starts tokenizer, generation and router on the embedded model and sends them the requests of `make fuzz`. After every
`--every` of them it prints the MiB that each process has in memory, those of generation's largest mapping, which is its
KV pool, and those of generation without that mapping. `--router-only`: TextService alone. Otherwise ClearCache is among
the calls, and the same blocks of the pool are used over and over.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / part) for part in ("services", "clients/python", "tests")]
from factories.servers.stack import Stack
from factories.wire.request_fuzz import RequestFuzzer
from penstock.generation.app import GenerationApp
from penstock.router.app import RouterApp
from penstock.tokenizer.app import TokenizerApp

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*?\n(?=[0-9a-f]+-[0-9a-f]+ |\Z)", re.MULTILINE | re.DOTALL)


def rss_mib(pid: int) -> float:
    """Memory of a process, without its children."""
    return float(psutil.Process(pid).memory_info().rss / 2**20)


def largest_mib(pid: int) -> tuple[float, float]:
    """Size of a process's largest mapping of no file, and the part that is in memory."""
    found = (0.0, 0.0)
    for mapping in _MAPPING.findall(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")):
        head, *rest = mapping.splitlines()
        # Address, permissions, offset, device, inode: a name follows where it is a file, the heap or a stack.
        if len(head.split()) == 5:
            values = {line.split(":")[0]: int(line.split()[1]) / 2**10 for line in rest if line.endswith(" kB")}
            found = max(found, (values["Size"], values["Rss"]))
    return found


async def measure(arguments: argparse.Namespace) -> int:
    """Run, and return the number of problems."""
    flags = ("--kv-memory", arguments.kv_memory, "--threads", "1")
    with Stack(generation_flags=flags) as stack:
        generation = stack.generations[0]
        services: dict[str, tuple[str, ...]] = {stack.router.address: RouterApp.grpc_services[:1]}
        if not arguments.router_only:
            services[stack.router.address] = RouterApp.grpc_services
            services[stack.tokenizer.address] = TokenizerApp.grpc_services
            services[generation.address] = GenerationApp.grpc_services

        def look() -> None:
            pids = [process.popen.pid for process in (stack.tokenizer, stack.router, generation)]
            tokenizer, router, whole = map(rss_mib, pids)
            size, pool = largest_mib(generation.popen.pid)
            print(
                f"| {fuzzer.totals.requests} | {tokenizer:.0f} | {router:.0f} | {whole:.0f} "
                f"| {pool:.0f} of {size:.0f} | {whole - pool:.0f} |",
                flush=True,
            )

        async with RequestFuzzer.opened(services, arguments.seed) as fuzzer:
            print("| requests | tokenizer | router | generation | its KV pool | generation without it |")
            print("|---|---|---|---|---|---|")
            look()
            totals = await fuzzer.run(arguments.requests, every=arguments.every, look=look)
            print(totals)
        return len(totals.problems)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--every", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--router-only", action="store_true")
    return min(1, asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
