"""Penstock's programs as forks of a process that has their imports, which take most of a start.

`fork_programs` lets `subprocess.Popen`, and with it asyncio, ask fork_server.py for a program of its list. The process
is then a child like any other: what Popen, `kill` and `wait` do with it is the same.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import asyncio.unix_events
import atexit
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop
from penstock.common.environment import quiet_environment

SWITCH = "PENSTOCK_FORKED_SERVICES"
# An order of a program is one message with so many at most.
MAX_ORDER_BYTES, MAX_DESCRIPTORS = 1 << 17, 100
# Room for a program's command line in the place of the server's own.
COMMAND_BYTES = 1 << 14
_PROGRAMS = frozenset(
    (
        "penstock.cli.main",
        "penstock.common.gguf_tokenizer",
        "penstock.generation.adapters.pattern_process",
        "penstock.generation.grammar.trial_process",
        "penstock.generation.parallel.worker",
        "penstock.tokenizer.load_process",
        "penstock.tokenizer.template_process",
    )
)
# Arguments of Popen that a fork does not know, with the values that it stands for.
_USUAL = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_SERVER = Path(__file__).parent / "fork_server.py"
# Starts a program by an order and the descriptors for its numbers; None where it cannot.
Fork = Callable[[dict[str, Any], dict[int, int]], int | None]


def fork_programs(fork: Fork) -> None:
    """Let `subprocess.Popen` start Penstock's programs by `fork`, except in environments with PENSTOCK_FORKED_SERVICES
    other than 1."""
    kind: Any = subprocess.Popen
    start_program = kind._execute_child
    signature = inspect.signature(start_program)

    def execute_child(popen: Any, *arguments: Any) -> None:
        given = signature.bind(popen, *arguments).arguments
        order = _order_of(given)
        pid = None if order is None else fork(order, _descriptors_of(given))
        if pid is None:
            start_program(popen, *arguments)
            return
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(*(given[name] for name in _PIPES))

    kind._execute_child = execute_child
    _let_uvloop_ask_popen()


def _let_uvloop_ask_popen() -> None:
    """Have uvloop start programs as asyncio does, by Popen; its own way is that of tests with `forked=False`."""
    loop: Any = uvloop.Loop
    loop.subprocess_exec = asyncio.base_events.BaseEventLoop.subprocess_exec
    # asyncio's method reads it; uvloop has its own in C.
    loop._debug = False
    of_unix: Any = asyncio.unix_events._UnixSelectorEventLoop
    loop._make_subprocess_transport = of_unix._make_subprocess_transport
    loop._child_watcher_callback = of_unix._child_watcher_callback


def _order_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Order of a program that may be forked."""
    words = given["args"]
    if isinstance(words, str | bytes | os.PathLike) or any(
        given.get(name, usual) != usual for name, usual in _USUAL.items()
    ):
        return None
    command, environment = [os.fspath(word) for word in words], given["env"]
    program = command[2:] if command[1:2] == ["-P"] else command[1:]
    if command[:1] != [sys.executable] or program[:1] != ["-m"] or not _PROGRAMS.intersection(program[1:2]):
        return None
    variables = dict(os.environ if environment is None else environment)
    if variables.get(SWITCH) != "1":
        return None
    return {
        "module": program[1],
        "command": command,
        "arguments": program[2:],
        "environment": variables,
        "folder": os.fspath(given["cwd"] or os.getcwd()),
        "session": bool(given["start_new_session"]),
    }


def _descriptors_of(given: Mapping[str, Any]) -> dict[int, int]:
    """Descriptors by the numbers that they have in the program."""
    standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    return {
        **{number: number if own == -1 else own for number, own in enumerate(standard)},
        **{int(number): int(number) for number in given["pass_fds"]},
    }


class ForkServer:
    """The server, which starts with the first program."""

    def __init__(self) -> None:
        """Make it."""
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        # What a service adds to its environment, and all that its libraries read.
        self._added: dict[str, str] = {}
        self._environment: dict[str, str] = {}

    def fork(self, order: dict[str, Any], descriptors: dict[int, int]) -> int | None:
        """Start a program; return its number, a child's of this process.

        None when it cannot: libraries read their variables when they are imported, and one differs from the server's.
        """
        with self._lock:
            process, connection = self._server or self._start()
            if self._of_libraries(order["environment"]) != self._environment:
                return None
            message = json.dumps({**order, "numbers": [*descriptors]}).encode()
            if len(message) > MAX_ORDER_BYTES:
                return None
            try:
                socket.send_fds(connection, [message], [*descriptors.values()])
                # 0: it has threads.
                return int(connection.recv(20)) or None
            except BaseException:
                # Its next answer may be to this order.
                process.kill()
                self._server = None
                raise

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        self._added = quiet_environment()
        self._environment = self._of_libraries(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_ORDER_BYTES)
            command = [sys.executable, str(_SERVER), str(os.getpid()), str(theirs.fileno()), "-" * COMMAND_BYTES]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._server = process, ours
        atexit.register(_end, *self._server)
        return self._server

    def _of_libraries(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that something may read when it is imported; others are read when a program starts."""
        everything = {**self._added, **environment}
        return {name: value for name, value in everything.items() if not name.startswith(_READ_LATE)}


# torchrun's are read when a group of ranks is made.
_READ_LATE = (
    *("PENSTOCK_", "PYTEST_", "PYTHONUNBUFFERED"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait()
