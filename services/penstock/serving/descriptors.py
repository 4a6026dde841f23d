"""File descriptors that a serving process may have: each connection takes one."""

from __future__ import annotations

import contextlib
import resource

# For a system without a hard limit: more than any limit on connections, small enough for tables by descriptor.
_MOST = 1 << 20


def raise_descriptor_limit() -> int:
    """Raise the soft limit of this process to its hard one, and return it.

    Shells and container engines set 1024, which `--max-connections` and the calls of a router's backends exceed. The
    soft limit protects programs that call select(), which Penstock's do not (setrlimit(2)).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    # A sandbox may forbid it: then the limit stays, and a listener reports when it is reached.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
