"""The driver's end of an engine's process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engines import EngineSpec
from benchmarks.engines.base import Settings, TextScores

ROOT = Path(__file__).resolve().parents[2]
CLOSE_SECONDS, STOP_SECONDS = 60.0, 10.0


class EngineFailed(Exception):
    """The engine said that it cannot, or ended; the message says why."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        # It is not installed.
        self.missing = missing


class EngineProcess:
    """Starts the process; every call waits for its answer and raises EngineFailed where there is none."""

    def __init__(self, name: str, spec: EngineSpec, cache: Path, threads: int, *, passive: bool) -> None:
        """`passive`: waiting threads of every engine sleep at once, for a machine with other work on it."""
        python = cache / spec.venv / "bin" / "python" if spec.venv else Path(sys.executable)
        if not python.is_file():
            raise EngineFailed(f"not installed: there is no {python}; `make peers` makes it", missing=True)
        self.name = name
        self.log = Path(tempfile.mkstemp(prefix=f"bench-{name}-", suffix=".log")[1])
        read_end, write_end = os.pipe()
        variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if passive or spec.passive:
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        if spec.preload and (library := cache / spec.venv / spec.preload).is_file():
            variables["LD_PRELOAD"] = str(library)
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.engines.worker", spec.adapter, str(write_end), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                cwd=ROOT,
                env={**inherited, **variables},
            )
        os.close(write_end)
        self._answers = os.fdopen(read_end)

    def load(self, settings: Settings) -> dict[str, Any]:
        """Facts of the loaded engine."""
        return self._call(command="load", settings=asdict(settings))

    def run(self, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
        """Times of every token and the peak of memory."""
        return self._call(command="run", prompts=prompts, outputs=outputs)

    def score(self, documents: list[list[int]]) -> TextScores:
        """Return the engine's readings of a text."""
        return TextScores(**self._call(command="score", documents=documents))

    def close(self) -> None:
        """End the process once it has answered. Raises EngineFailed where it did not end well."""
        try:
            self._call(command="close")
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"did not end within {CLOSE_SECONDS:.0f} s; see {self.log}") from None
        finally:
            self.stop()
        if code:
            raise EngineFailed(f"ended with {code}; see {self.log}")
        self.log.unlink()

    def stop(self) -> None:
        """End the process whatever it does, and all that it started: what is left after a while by force."""
        if self._process.poll() is None:
            process = psutil.Process(self._process.pid)
            family = [*process.children(recursive=True), process]
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self._process.wait()
        self._answers.close()

    def _call(self, **message: Any) -> dict[str, Any]:
        if self._process.stdin is None:
            raise EngineFailed("has no stdin")
        try:
            self._process.stdin.write((json.dumps(message) + "\n").encode())
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"the process is gone; see {self.log}") from error
        line = self._answers.readline()
        if not line:
            raise EngineFailed(f"the process ended with {self._process.wait()}; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']} ({self.log})", missing=bool(answer.get("missing")))
        return answer
