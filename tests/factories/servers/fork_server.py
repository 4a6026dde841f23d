"""Program that forks Penstock's programs, with their imports already done: torch alone would take each two seconds.

`fork_server.py CALLER DESCRIPTOR PADDING`: orders come from that socket, a JSON object each with the descriptors that
the program gets (forked.py makes them). Each is answered with the id of a process that has the caller for its parent,
as this one has (CLONE_PARENT). So it is waited for and killed as any other. Programs that a forked one starts are forks
of that one, in the same way. But each has every program's modules, torch among them: a test of what a service imports,
or of its memory, starts it with `forked=False`.

Two things of a program are left out, each of which takes more of the processor than all else of a start: the import of
transformers by the process that loads a tokenizer, and Python's own end, which takes all modules apart.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_CLONE_PARENT = 0x8000
# Numbers of the system call.
_CLONE = {"x86_64": 56, "aarch64": 220}
# Not the folder of this file: its modules have common names.
sys.path[0] = str(Path(__file__).parents[2])
from factories.servers.forked import MAX_DESCRIPTORS, MAX_ORDER_BYTES, fork_programs  # noqa: E402

sys.path[0] = os.getcwd()


def serve(caller: int, orders: socket.socket) -> NoReturn:
    """Fork until the caller ends."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        orders.send(str(_fork_for(caller, json.loads(message), descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_for(caller: int, order: dict[str, Any], descriptors: list[int]) -> int:
    """Start a program as a child of `caller`. 0 where this process has threads, of a library: see `_fork_sibling`."""
    if len(os.listdir("/proc/self/task")) > 1:
        return 0
    if (pid := _fork_sibling()) == 0:
        if os.getppid() != caller:
            os._exit(1)
        _run(order, dict(zip(order["numbers"], descriptors, strict=True)))
    return pid


def _fork_sibling() -> int:
    """Fork as os.fork() does, but a child of this process's parent.

    A fork between the two, orphaned to the same end, would copy all page tables once more. What libraries in C do at a
    fork is left out: it is about their threads, and there are none.
    """
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(ctypes.PyDLL(None).syscall(_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone failed")
    return pid


def _fork_here(order: dict[str, Any], descriptors: dict[int, int]) -> int | None:
    """Start a program as a child of this process, which is a forked one itself. None for a rank: what computes is a
    fork of a process that has not computed."""
    if order["module"] == "penstock.generation.parallel.worker":
        return None
    begun, end = os.pipe()
    if (pid := os.fork()) == 0:
        # What the parent wants done at its own end, or when it collects what it has dropped.
        atexit._clear()
        gc.freeze()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            # As in a new program: what is ignored stays so.
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _forget_imports_under_way()
        _run(order, descriptors)
    os.close(end)
    # Until the child has closed its copies of this process's descriptors.
    os.read(begun, 1)
    os.close(begun)
    return pid


def _forget_imports_under_way() -> None:
    """Let modules be imported anew that another thread of the parent was importing: it is not here to end that."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    bootstrap._module_locks.clear()
    bootstrap._blocking_on.clear()
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]


def _run(order: dict[str, Any], descriptors: dict[int, int]) -> NoReturn:
    """Be the program, to its end."""
    code: object = 1
    try:
        _become(order, descriptors)
        _main_of(order["module"])()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    _end(code)


def _become(order: dict[str, Any], descriptors: dict[int, int]) -> None:
    # First out of the way of each other's numbers, which are high where the caller has many files open.
    beyond = 1 + max(descriptors)
    moved = {number: fcntl.fcntl(own, fcntl.F_DUPFD, beyond) for number, own in descriptors.items()}
    os.closerange(3, beyond)
    for number, own in moved.items():
        os.dup2(own, number)
    os.closerange(beyond, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    if order["session"]:
        os.setsid()
    # As Python begins.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    _name_process(order["command"])
    sys.path[0] = order["folder"]
    sys.argv[1:] = order["arguments"]
    # Those of the parent are kept: they may have what it has not written yet.
    _parents.append((sys.stdin, sys.stdout, sys.stderr))
    is_unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=is_unbuffered, line_buffering=sys.stdout.isatty())
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
    sys.stderr.reconfigure(write_through=is_unbuffered, line_buffering=True)


_parents: list[Any] = []


def _name_process(command: list[str]) -> None:
    """Write a command line in the place of this process's own, which whoever lists processes reads."""
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
    text = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _main_of(module: str) -> Callable[[], object]:
    """Return what the module does as a program."""
    main = getattr(importlib.import_module(module), "main", None)
    if main is None or inspect.signature(main).parameters:
        warnings.simplefilter("ignore", RuntimeWarning)
        return functools.partial(runpy.run_module, module, run_name="__main__")
    return lambda: sys.exit(main())


def _end(code: object) -> NoReturn:
    """End as Python does, but for the memory, which goes with the process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr, flush=True)
        code = 1
    os._exit(code or 0)


def _import_programs() -> None:
    """Import what programs do, and leave out what their forks have."""
    from penstock.cli import app  # noqa: F401
    from penstock.cli.serve import tree, worker_processes  # noqa: F401
    from penstock.cli.serve.service_process import ROLES
    from penstock.common import child_io
    from penstock.generation.grammar import trial_process  # noqa: F401
    from penstock.generation.parallel import worker  # noqa: F401
    from penstock.tokenizer import load_process, template_process  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401
    from transformers.utils import chat_template_utils  # noqa: F401

    for role in ROLES.values():
        role.config_class()
        role.app_class()
    # They would pretend that there is no torch, and shorten the import of transformers.
    child_io.forbid_torch = functools.partial(logging.disable, logging.WARNING)
    load_process.read_sources_once = lambda: None


if __name__ == "__main__":
    from penstock.common.environment import prepare_environment

    prepare_environment()
    _import_programs()
    fork_programs(_fork_here)
    # Pages of what is there are shared as long as the collector does not write to it.
    gc.collect()
    gc.freeze()
    serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
