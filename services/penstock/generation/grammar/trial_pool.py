"""Pool of killable processes that try constraints, one at a time each. They start when first needed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.common.child_io import Child, ChildEnded
from penstock.common.environment import child_environment
from penstock.common.errors import Internal, ResourceExhausted
from penstock.common.logging import get_logger
from penstock.common.work_time import WorkTime
from penstock.generation.grammar.grammar_limits import GrammarLimits

_MODULE = "penstock.generation.grammar.trial_process"
_log = get_logger("penstock.generation.grammar")


class OverLimit(Exception):
    """Error for a constraint that took more time of the processor, or memory, than allowed. Its process is gone."""


class TrialPool:
    """Pool of at most `compile_processes` processes. All methods belong to one event loop."""

    def __init__(self, settings: Mapping[str, Any], limits: GrammarLimits) -> None:
        """`settings`: the folder and vocab_size of the child's GrammarTokenizer."""
        self._settings = {
            **settings,
            "memory_bytes": limits.constraint_compile_memory_bytes,
            "cpu_seconds": limits.constraint_compile_seconds,
            "mask_seconds": limits.mask_seconds,
            "json": asdict(limits.json),
        }
        self._limits = limits
        self._places = asyncio.Semaphore(limits.constraint_processes)
        self._idle: list[Child] = []
        self._processes: set[Child] = set()
        self._num_queued = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the live processes."""
        return [process.pid for process in self._processes]

    async def try_constraint(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Return the child's answer. Raises OverLimit, ResourceExhausted (queue) and Internal (no process starts)."""
        if self._num_queued >= self._limits.max_queued_constraints:
            raise ResourceExhausted(
                "too many constraints are waiting to be compiled", reason="QUEUE_FULL", retry_after_seconds=0.5
            )
        self._num_queued += 1
        try:
            await self._places.acquire()
        finally:
            self._num_queued -= 1
        try:
            return await self._exchange(await self._take(), request)
        finally:
            self._places.release()

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(self._end(process) for process in list(self._processes)))

    async def _exchange(self, process: Child, request: Mapping[str, Any]) -> dict[str, str]:
        answered = False
        asked = asyncio.ensure_future(process.ask(request))
        limit = WorkTime(process, self._limits.constraint_compile_seconds)
        try:
            while not asked.done():
                if not (left := limit.left()):
                    if limit.is_starved():
                        raise ResourceExhausted(
                            "the machine is too busy to compile constraints", reason="QUEUE_FULL", retry_after_seconds=1
                        )
                    raise OverLimit("time")
                await asyncio.wait((asked,), timeout=left)
            answer: dict[str, str] = asked.result()
            answered = True
            return answer
        except ChildEnded:
            # Memory was refused, the stack overflowed, or the kernel's clock ran faster than this process's.
            _log.warning("a constraint ended its trial process", status=process.returncode)
            raise OverLimit("time" if process.returncode == -signal.SIGXCPU else "memory") from None
        finally:
            asked.cancel()
            # An answer without a reader would reach the next request.
            if answered:
                self._idle.append(process)
            else:
                await asyncio.shield(self._end(process))

    async def _take(self) -> Child:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._processes.discard(process)
        process = await Child.spawn(_MODULE, child_environment())
        self._processes.add(process)
        started = False
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                await process.ask(self._settings)
            started = True
        except TimeoutError:
            raise ResourceExhausted(
                "the machine is too busy to start the process that compiles constraints",
                reason="QUEUE_FULL",
                retry_after_seconds=1,
            ) from None
        except ChildEnded as error:
            raise Internal("the process that compiles constraints did not start", reason="COMPILER_FAILED") from error
        finally:
            if not started:
                await asyncio.shield(self._end(process))
        return process

    async def _end(self, process: Child) -> None:
        self._processes.discard(process)
        await process.kill()
