"""`python -m penstock.generation.adapters.pattern_process`: matches regular expressions with names, and ends in time.

It reads {seconds, patterns, names} as JSON from its input, and writes the number of the first pattern that matches each
name, -1 for none. An invalid pattern ends it with status 1.
"""

from __future__ import annotations

import json
import re
import sys

from penstock.common.child_limits import limit_cpu, limit_memory

# Compiled expressions are small; one of large repetitions is not.
_MEMORY_BYTES = 256 * 2**20


def main() -> None:
    """Answer one order."""
    order = json.loads(sys.stdin.buffer.read())
    limit_memory(_MEMORY_BYTES)
    limit_cpu(order["seconds"])
    try:
        patterns = [re.compile(rf"(.*\.)?({text})$") for text in order["patterns"]]
    except (re.error, RecursionError, OverflowError, MemoryError):
        sys.exit(1)
    numbers = (
        next((number for number, pattern in enumerate(patterns) if pattern.match(name)), -1) for name in order["names"]
    )
    sys.stdout.write(json.dumps(list(numbers)))


if __name__ == "__main__":
    main()
