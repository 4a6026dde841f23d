"""Program that forks service processes. What they import, it has: torch alone would take each of them two seconds.

Reads orders from stdin, a line of JSON each: `arguments` of `penstock`, its `environment`, working `folder`, and files
for its `stdin`, `stdout` and `stderr`. Answers each with a line, the id of a process that has the caller, given as
argument, for its parent: it is orphaned at once, and the caller is a subreaper meanwhile. So it is waited for and
killed as any other. But it has every service's modules, torch among them: a test of what a service imports, or of its
memory, starts it with `forked=False`.

Two things of a program are left out, each of which takes more of the processor than all else of a start: the import of
transformers by the process that loads a tokenizer, which is a fork of the tokenizer service here, and Python's own end,
which takes all modules apart.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from penstock.common.child_io import Child


def serve() -> None:
    """Fork until stdin ends, which ends this process; return in each fork, which is then as a new one."""
    from penstock.cli.serve.service_process import ROLES

    caller = int(sys.argv[1])
    for role in ROLES.values():
        role.config_class()
        role.app_class()
    _fork_children()
    # Pages of what is there are shared as long as the collector does not write to it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        answers, answer = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.pidfd_open(os.getpid())
            if (pid := os.fork()) != 0:
                os.write(answer, str(pid).encode())
                os._exit(0)
            # It is readable once that process has ended, which is after its child has got another parent.
            select.select([parent], [], [])
            if os.getppid() != caller:
                os._exit(1)
            _become(order)
            return
        os.close(answer)
        os.waitpid(between, 0)
        os.write(1, os.read(answers, 20) + b"\n")
        os.close(answers)
    os._exit(0)


def _become(order: dict[str, Any]) -> None:
    files = (order["stdin"], os.O_RDONLY), *((order[name], os.O_WRONLY | os.O_APPEND) for name in ("stdout", "stderr"))
    for number, (file, flags) in enumerate(files):
        os.dup2(os.open(file, flags), number)
    _close_descriptors()
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    sys.argv[1:] = order["arguments"]


def _fork_children() -> None:
    """Let tokenizer services fork their child processes, with what these import."""
    from penstock.common import child_io
    from penstock.common.child_io import Child
    from penstock.tokenizer import load_process, template_process
    from transformers import AutoTokenizer  # noqa: F401  # for their forks
    from transformers.utils import chat_template_utils  # noqa: F401  # likewise

    # They would pretend that there is no torch, and shorten the import of transformers.
    child_io.forbid_torch = functools.partial(logging.disable, logging.WARNING)
    load_process.read_sources_once = lambda: None
    forked = (load_process.__name__, template_process.__name__)
    start_program = Child.spawn

    async def spawn(cls: type[Child], module: str, environment: dict[str, str]) -> Child:
        if module not in forked:
            return await start_program(module, environment)
        program = functools.partial(_be_child, module, environment)
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": None}
        start = asyncio.get_running_loop().subprocess_exec
        return cls(*await start(child_io._Wire, module, **pipes, start_new_session=True, preexec_fn=program))

    Child.spawn = classmethod(spawn)  # type: ignore[assignment]


def _be_child(module: str, environment: dict[str, str]) -> NoReturn:
    """Run what the program would, in a fork with its pipes. The parent waits until its other descriptors are closed."""
    _close_descriptors()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        # As in a new program: what is ignored stays so.
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # As Python begins.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    code = 0
    try:
        importlib.import_module(module).main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    # Without what the service wants done at its own end.
    os._exit(code)


def _close_descriptors() -> None:
    """Close all but stdin, stdout and stderr, as a new program begins."""
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))


def _end(code: object) -> NoReturn:
    """End as Python does, but for the memory, which goes with the process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    # Not the folder of this file: its modules have common names.
    sys.path[0] = os.getcwd()
    from penstock.cli.main import main
    from penstock.common.environment import prepare_environment

    prepare_environment()
    serve()
    try:
        main()
    except SystemExit as ended:
        _end(ended.code)
