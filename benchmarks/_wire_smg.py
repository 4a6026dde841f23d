"""The smg gateway before a backend of benchmarks/wire.py, where `make peers` has installed it.

It does what router and tokenizer do together: routing, chat template, tokenising, detokenising, and a message for each
token, server-sent events of /v1/chat/completions. https://pypi.org/project/smg/
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from factories.servers import stack

from benchmarks._processes import ending_with_us
from benchmarks.checkpoints import CACHE

PROGRAM = CACHE / "smg-venv" / "bin" / "smg"
_START_SECONDS, _LOOK_SECONDS = 120.0, 0.1


@dataclass(frozen=True)
class Gateway:
    """A running one."""

    process: subprocess.Popen[bytes]
    address: str
    model: str
    log: Path

    def wait_ready(self) -> None:
        """Until it has its worker's tokenizer. Raises SystemExit with its output if it does not come to that."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if _has_tokenizer(self.address, self.model):
                return
            time.sleep(_LOOK_SECONDS)
        raise SystemExit(f"smg did not get ready:\n{self.log.read_text(errors='replace')}")


def _has_tokenizer(address: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v1/tokenizers", timeout=5) as answer:
            return any(one["name"] == model for one in json.load(answer)["tokenizers"])
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def start(worker: str, model: str, flags: list[str]) -> Gateway:
    """Before the worker at host:port, which says where its model's tokenizer is; the last of equal flags counts."""
    port, metrics_port = stack.free_port(), stack.free_port()
    log = Path(tempfile.mkstemp(prefix="smg-", suffix=".log")[1])
    command = [str(PROGRAM), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{worker}"]
    command += ["--backend", "vllm", "--history-backend", "none"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    # One worker needs no policy that learns, and no line of log for every request.
    command += ["--policy", "round_robin", "--log-level", "error", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(ending_with_us(*command), stdout=out, stderr=subprocess.STDOUT)
    return Gateway(process, f"127.0.0.1:{port}", model, log)
