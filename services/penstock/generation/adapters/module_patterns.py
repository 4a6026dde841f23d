"""Values that adapter_config.json gives to modules by patterns of their names: rank_pattern, alpha_pattern.

A key is a regular expression in peft 0.18 (peft/utils/other.py:get_pattern_key), and nearly always a module's name or
the end of one. Such a key is looked up. Python's regular expressions can take exponential time, and hold the
interpreter's lock meanwhile, so all other keys are matched in a process of their own that ends in time.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from penstock.common.environment import child_environment
from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_limits import AdapterLimits

_PLAIN = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
# A pattern with a repeated group, or many repetitions, is refused before anything runs.
_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]")
_MOST_REPETITIONS = 4
# Factor from processor time to time by the clock, on a busy machine.
_PATIENCE = 10.0
_OWN_SECONDS = 5.0


class ModulePatterns:
    """The checked keys of one field, in order."""

    def __init__(self, field: str, keys: Sequence[str], limits: AdapterLimits) -> None:
        """Check them. Raises InvalidArgument naming the field and the bound."""
        self.field = field
        self._limits = limits
        if len(keys) > limits.max_adapter_patterns:
            raise self._error(
                f"{len(keys)} entries of {field}: --max-adapter-patterns is {limits.max_adapter_patterns}",
                "ADAPTER_UNSUPPORTED",
            )
        self._keys = tuple(keys)
        for key in keys:
            repetitions = sum(key.count(mark) for mark in "*+?{")
            is_complex = repetitions > _MOST_REPETITIONS or _REPEATED_GROUP.search(key)
            if len(key) > limits.max_pattern_chars or is_complex or not key.isprintable():
                raise self._error(f"a pattern of {field} is too complex: name the modules", "ADAPTER_UNSUPPORTED")

    def first_matches(self, modules: Sequence[str]) -> Mapping[str, int]:
        """Return module -> number of the first key that matches it; other modules are left out. Blocking.

        Raises InvalidArgument: a key is no regular expression (ADAPTER_BROKEN), or they take longer than the limit
        (ADAPTER_UNSUPPORTED).
        """
        ends: dict[str, list[str]] = {}
        for module in modules:
            for end in _ends(module):
                ends.setdefault(end, []).append(module)
        found: dict[str, int] = {}
        expressions: list[int] = []
        for number, key in enumerate(self._keys):
            if key in ends:
                for module in ends[key]:
                    found.setdefault(module, number)
            elif not _PLAIN.fullmatch(key) or "." in key:
                # Even a name with dots that no module has: a dot means any character.
                expressions.append(number)
        if expressions and modules:
            for module, number in self._by_process(expressions, modules).items():
                found[module] = min(found.get(module, number), number)
        return found

    def _by_process(self, expressions: Sequence[int], modules: Sequence[str]) -> Mapping[str, int]:
        seconds = self._limits.adapter_pattern_seconds
        order = {
            "seconds": seconds,
            "patterns": [self._keys[number] for number in expressions],
            "names": list(modules),
        }
        command = [sys.executable, "-m", "penstock.generation.adapters.pattern_process"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(order).encode(),
                capture_output=True,
                env=child_environment(),
                timeout=_PATIENCE * seconds + _OWN_SECONDS,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise self._too_slow() from None
        except OSError as error:
            raise self._error(f"no process could be started for {self.field}", "ADAPTER_UNSUPPORTED") from error
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise self._too_slow()
        if done.returncode:
            raise self._error(f"a pattern of {self.field} is not a regular expression", "ADAPTER_BROKEN")
        answer: list[int] = json.loads(done.stdout)
        return {module: expressions[number] for module, number in zip(modules, answer, strict=True) if number >= 0}

    def _too_slow(self) -> InvalidArgument:
        return self._error(
            f"the patterns of {self.field} take longer than --adapter-pattern-seconds "
            f"{self._limits.adapter_pattern_seconds:g}: name the modules",
            "ADAPTER_UNSUPPORTED",
        )

    def _error(self, problem: str, reason: str) -> InvalidArgument:
        return InvalidArgument("path", f"adapter_config.json: {problem}", reason=reason)


def _ends(module: str) -> Iterator[str]:
    """Yield the name, and the part after each of its dots."""
    yield module
    while "." in module:
        _, _, module = module.partition(".")
        yield module
