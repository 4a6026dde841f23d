"""Instructions that a Penstock process runs in user mode, counted by valgrind's callgrind (Debian: valgrind).

Run as a program, it is Penstock's command line under callgrind. A process then takes some fifty times as long, but its
instructions are the same on a busy machine and wherever its memory lies; only what is done by the clock differs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

# File that the names of dumps begin with.
VARIABLE = "PENSTOCK_BENCHMARK_DUMPS"


@dataclass(frozen=True)
class Callgrind:
    """The counter of a process that was started under it. `dumps`: the value of its VARIABLE."""

    pid: int
    dumps: Path

    async def begin(self) -> None:
        """Count from now on."""
        await self._control("--instr=on")

    async def reset(self) -> None:
        """Count from 0."""
        await self._control("--zero")

    async def taken(self) -> int:
        """Instructions since the last `reset` or `taken`. Raises SystemExit where callgrind does not answer."""
        before = set(self.dumps.parent.glob(f"{self.dumps.name}.*"))
        await self._control("--dump")
        # A dump for each thread, or one of all.
        new = set(self.dumps.parent.glob(f"{self.dumps.name}.*")) - before
        totals = [re.findall(r"^(?:totals|summary): (\d+)", one.read_text(errors="replace"), re.M) for one in new]
        if not any(totals):
            raise SystemExit(f"callgrind wrote no dump of process {self.pid}")
        return sum(max(map(int, found)) for found in totals if found)

    async def _control(self, flag: str) -> None:
        quiet = asyncio.subprocess.DEVNULL
        control = await asyncio.create_subprocess_exec(
            "callgrind_control", flag, str(self.pid), stdout=quiet, stderr=quiet
        )
        if await control.wait():
            raise SystemExit(f"callgrind_control {flag} failed for process {self.pid}")


def check_installed() -> None:
    """Raise SystemExit where valgrind is not installed."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        raise SystemExit("--instructions needs valgrind (Debian: valgrind)")


if __name__ == "__main__":
    flags = ("--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={os.environ[VARIABLE]}", "--quiet")
    os.execvp("valgrind", ["valgrind", *flags, sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]])
