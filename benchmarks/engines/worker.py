"""The process of one engine: reads commands as JSON lines from stdin, answers them on a file descriptor of its own.

    python -m benchmarks.engines.worker ADAPTER FD PARENT_PID

Between commands it waits in a read, so that it leaves the cores alone while another engine has its turn. SIGTERM, the
end of stdin and that of the driver end it, and what the engine started with it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks._processes import end_with_parent, stop_on_sigterm
from benchmarks.engines.base import Adapter, Settings

CHUNK = 1 << 23
# Of a processor's time, in a second.
TICKS = os.sysconf("SC_CLK_TCK")


class Worker:
    """Carries out the driver's commands."""

    def __init__(self, adapter: str) -> None:
        self._adapter_name = adapter
        self._adapter: Adapter | None = None

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Bring the engine up; how long that took, beside how long reading the weights' files takes."""
        module, _, name = self._adapter_name.partition(":")
        chosen = Settings(**{**settings, "adapters": tuple(settings["adapters"])})
        adapter: Adapter = getattr(importlib.import_module(module), name)(chosen)
        adapter.prepare()
        reading = _read_seconds(Path(chosen.model))
        _reset_peaks(adapter.processes())
        start = time.perf_counter()
        adapter.load()
        seconds = time.perf_counter() - start
        self._adapter = adapter
        return {
            "version": adapter.version(),
            "load_seconds": seconds,
            "read_seconds": reading,
            "load_peak_rss_bytes": _status(adapter.processes(), "VmHWM"),
            "loaded_rss_bytes": _status(adapter.processes(), "VmRSS"),
            **adapter.facts(),
        }

    def run(self, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
        """One cell once. Raises RuntimeError when the engine gave another number of tokens than asked."""
        if self._adapter is None:
            raise RuntimeError("run before load")
        _reset_peaks(self._adapter.processes())
        used = _processor_seconds(self._adapter.processes())
        times = self._adapter.run(prompts, outputs)
        used = max(_processor_seconds(self._adapter.processes()) - used, 1 / TICKS)
        got = [len(one) for one in times]
        if got != outputs:
            wrong = next(index for index, (a, b) in enumerate(zip(got, outputs, strict=True)) if a != b)
            raise RuntimeError(f"request {wrong} got {got[wrong]} tokens instead of {outputs[wrong]}")
        peak = _status(self._adapter.processes(), "VmHWM")
        return {"times": times, "peak_rss_bytes": peak, "processor_s": used}

    def score(self, documents: list[list[int]]) -> dict[str, Any]:
        """Return the engine's readings of a text. Raises RuntimeError where their number is wrong."""
        if self._adapter is None:
            raise RuntimeError("score before load")
        scores = self._adapter.score(documents)
        wanted = sum(len(document) - 1 for document in documents)
        if len(scores.log_probabilities) != wanted or len(scores.likeliest) not in (0, wanted):
            raise RuntimeError(f"{len(scores.log_probabilities)} readings of {wanted} tokens")
        return asdict(scores)

    def close(self) -> dict[str, Any]:
        """End the engine, if it has not ended yet."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()
        return {}


def _read_seconds(folder: Path) -> float:
    """Time of reading the weights' files; the second time, so that all of them come from the page cache."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        buffer = bytearray(CHUNK)
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds


def _reset_peaks(pids: list[int]) -> None:
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): VmHWM starts again


def _status(pids: list[int], field: str) -> int:
    """Bytes, summed over processes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                total += int(line.split()[1]) * 1024
    return total


def _processor_seconds(pids: list[int]) -> float:
    """Processor time of all threads, summed over processes."""
    ticks = 0
    for pid in pids:
        # proc(5): utime and stime are fields 14 and 15; the second, in brackets, may have spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def main() -> None:
    """Until close, the end of stdin or SIGTERM."""
    stop_on_sigterm()
    end_with_parent(int(sys.argv[3]), signal.SIGTERM)
    worker = Worker(sys.argv[1])
    try:
        _serve(worker, os.fdopen(int(sys.argv[2]), "w"))
    finally:
        worker.close()


def _serve(worker: Worker, answers: TextIO) -> None:
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load,
        "run": worker.run,
        "score": worker.score,
        "close": worker.close,
    }
    for line in sys.stdin:
        message = json.loads(line)
        name = message.pop("command")
        try:
            answer = commands[name](**message)
        except Exception as error:  # the driver goes on without this engine, and shows why
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": _is_missing(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if name == "close":
            break


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ImportError)


if __name__ == "__main__":
    main()
