"""Program that forks service processes. What they import, it has: torch alone would take each of them two seconds.

Reads orders from stdin, a line of JSON each: `arguments` of `penstock`, its `environment`, working `folder` and `log`.
Answers each with a line, the id of a process that has the caller, given as argument, for its parent: it is orphaned at
once, and the caller is a subreaper meanwhile. So it is waited for and killed as any other. But it has every service's
modules, torch among them: a test of what a service imports, or of its memory, starts it with `forked=False`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
from typing import Any


def serve() -> None:
    """Fork until stdin ends, which ends this process; return in each fork, which is then as a new one."""
    from penstock.cli.serve.service_process import ROLES

    caller = int(sys.argv[1])
    for role in ROLES.values():
        role.config_class()
        role.app_class()
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
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for number, opened in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(opened, number)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    sys.argv[1:] = order["arguments"]


if __name__ == "__main__":
    # Not the folder of this file: its modules have common names.
    sys.path[0] = os.getcwd()
    from penstock.cli.main import main
    from penstock.common.environment import prepare_environment

    prepare_environment()
    serve()
    main()
