"""Service processes that fork_server.py forks, for a start without the two seconds that their imports take."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.common.environment import quiet_environment

_PR_SET_CHILD_SUBREAPER = 36
_SERVER = Path(__file__).parent / "fork_server.py"


class ForkedProcess:
    """Child process that was not started by Popen; these of its methods mean the same."""

    def __init__(self, pid: int) -> None:
        """Make it for a child of this process."""
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """See Popen."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See Popen. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            watched = os.pidfd_open(self.pid)
            try:
                waiting = select.poll()
                waiting.register(watched, select.POLLIN)
                waiting.poll(None if timeout is None else max(0, timeout * 1000))
            finally:
                os.close(watched)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """See Popen."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """See Popen."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Popen."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server, which starts with the first process."""

    def __init__(self) -> None:
        """Make it."""
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        # What a service adds to its environment, and all that its libraries read.
        self._added: dict[str, str] = {}
        self._environment: dict[str, str] = {}

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path | None = None,
        stdin: Path | None = None,
    ) -> ForkedProcess | None:
        """Start `penstock` with these arguments; its output goes to files that are there, all to one without `stderr`.

        None when it cannot: libraries read their variables when they are imported, and one differs from the server's.
        """
        with self._lock:
            server = self._server or self._start()
            if self._of_libraries(environment) != self._environment:
                return None
            files = {"stdin": str(stdin or os.devnull), "stdout": str(stdout), "stderr": str(stderr or stdout)}
            order = {"arguments": arguments, "environment": environment, "folder": os.getcwd(), **files}
            try:
                with _adopting():
                    assert server.stdin is not None
                    assert server.stdout is not None
                    server.stdin.write(json.dumps(order).encode() + b"\n")
                    server.stdin.flush()
                    return ForkedProcess(int(server.stdout.readline()))
            except BaseException:
                # Its next answer may be to this order.
                server.kill()
                self._server = None
                raise

    def _start(self) -> subprocess.Popen[bytes]:
        self._added = quiet_environment()
        self._environment = self._of_libraries(os.environ)
        command = [sys.executable, str(_SERVER), str(os.getpid())]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(_end, self._server)
        return self._server

    def _of_libraries(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that something may read when it is imported; ours are read when a service starts."""
        everything = {**self._added, **environment}
        return {name: value for name, value in everything.items() if not name.startswith(("PENSTOCK_", "PYTEST_"))}


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.communicate()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphans. Only meanwhile: others' would wait for this process to look at them, for ever."""
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(value: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
