"""Child processes, on either event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Literal

import pytest
from penstock.common import event_loop
from penstock.common.child_io import Child, ChildEnded


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_child_that_has_ended_is_told_to_each_caller(loop: Literal["asyncio", "uvloop"]) -> None:
    """Also to those who ask when its pipe is closed: uvloop's refuses to be written to."""

    async def ask() -> None:
        child = await Child.spawn("penstock.tokenizer.load_process", dict(os.environ))
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait((child.ended,))
        for _ in range(3):
            with pytest.raises(ChildEnded):
                await child.ask({"folder": "nowhere"})
            await child.wait_status()
        assert child.returncode == -signal.SIGKILL
        await child.kill()

    event_loop.run(ask(), event_loop.loop_factory(loop, is_tls=False))
