"""A start shows how far it is: a model that comes from a hub, its weights; by a line, lines, or records."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import pty
import re
import signal
import sys
import termios
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from factories.servers.hub import HUB_CHUNK, Hub, running_hub
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock_client import AsyncClient

SMALL = ("--kv-memory", "16MiB", "--threads", "1", "--port", "0", "--metrics-port", "0", "--tune-seconds", "0")
PATIENCE_SECONDS = 120.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the demo model and a large file beside it, of which only a piece comes until a test allows more."""
    files = {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
    files["large.json"] = b"{}".ljust(3 * HUB_CHUNK)
    with running_hub(files, tmp_path, held="large.json") as hub:
        hub.allow(HUB_CHUNK + 1)
        yield hub


def expected(text: str) -> Callable[[str], bool]:
    pattern = re.compile(text)
    return lambda output: bool(pattern.search(output))


class Started:
    """A `penstock serve` and all that it has written."""

    def __init__(self, process: Process, output: asyncio.StreamReader) -> None:
        self.process, self.text = process, ""
        self._output = output
        # A piece of output may end amid a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    async def until(self, text: str) -> None:
        """Read until the pattern is there."""
        found = expected(text)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not found(self.text):
                data = await self._output.read(65536)
                assert data, self.text
                self.text += self._decoder.decode(data)

    async def rest(self) -> str:
        """Read to the end."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            # A terminal whose last process is gone is an error in place of an end.
            with contextlib.suppress(OSError):
                while data := await self._output.read(65536):
                    self.text += self._decoder.decode(data)
        return self.text

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def serve(hub: Hub, *words: str) -> AsyncIterator[Started]:
    """Run `penstock serve WORDS` without a terminal."""
    command = (sys.executable, "-m", "penstock.cli.main", "serve", *words)
    environment = {**os.environ, **hub.environment}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, env=environment)
    assert process.stdout is not None
    try:
        yield Started(process, process.stdout)
    finally:
        hub.allow(None)
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def serve_on_terminal(hub: Hub, *words: str) -> AsyncIterator[Started]:
    """Run `penstock serve WORDS` on a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = (sys.executable, "-m", "penstock.cli.main", "serve", *words)
    environment = {**os.environ, **hub.environment, "TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb"))
    try:
        yield Started(process, reader)
    finally:
        hub.allow(None)
        if process.returncode is None:
            process.kill()
            await process.wait()
        transport.close()


@pytest.mark.slow
async def test_a_tree_tells_of_a_download_in_plain_lines(hub: Hub) -> None:
    async with serve(hub, hub.repo, *SMALL) as started:
        await started.until(r"downloading owner/tiny: \d+ %, .* of 38.\d MiB")
        assert "READY" not in started.text
        hub.allow(None)
        await started.until(r"READY · gRPC (\S+)")
        lines = started.text.splitlines()
        assert len([line for line in lines if line.startswith("downloaded owner/tiny: ")]) == 1
        # Two processes want the model: one of them downloads, and the other says nothing of its wait.
        assert len(hub.sent) == len(set(hub.sent))
        assert "waiting for" not in started.text
        # No escape sequences, no bars of a library.
        assert "\x1b" not in started.text
        assert "Fetching" not in started.text
        address = next(word for word in lines[-1].split() if word.startswith("127.0.0.1:"))
        async with AsyncClient(address) as client:
            completion = await client.generate(user("Hello"), max_new_tokens=3, ignore_eos=True)
        assert completion.usage.completion_tokens == 3
        assert await started.stop() == 0


@pytest.mark.slow
async def test_a_terminal_has_one_line_that_changes(hub: Hub) -> None:
    async with serve_on_terminal(hub, hub.repo, *SMALL) as started:
        # A speed is told after a second.
        await started.until(r"\r\x1b\[2Kdownloading owner/tiny .*━.*\D[1-9]\d? %, .* of 38.\d MiB, .*/s, .* left")
        # Drawn over, never below.
        drawn = started.text[started.text.index("downloading") :]
        assert "\n" not in drawn
        hub.allow(None)
        await started.until("READY · gRPC")
        told = re.sub(r"\r\x1b\[2K[^\n\r]*\r(?!\n)", "", started.text).replace("\r\x1b[2K", "")
        assert re.search(r"downloaded owner/tiny: 38.\d MiB in [\d.]+ s\r?\n", told)
        assert "downloading" not in told
        assert await started.stop() == 0


async def test_a_service_by_itself_writes_records_where_its_log_is_json(hub: Hub) -> None:
    async with serve(hub, "generation", hub.repo, *SMALL, "--log-format", "json") as started:
        await started.until(r'"stage": "download"')
        hub.allow(None)
        await started.until("READY generation")
        assert await started.stop() == 0
    records = [json.loads(line) for line in started.text.splitlines() if line.startswith("{")]
    found = [record for record in records if record["event"] == "progress"]
    steps = [(record["stage"], record["state"]) for record in found if record["state"] != "running"]
    stages = ("download", "load_weights", "tune", "warm_up")
    assert steps == [(stage, state) for stage in stages for state in ("begin", "end")]
    begin, end = found[0], next(record for record in found if record["state"] == "end")
    assert (begin["model"], begin["percent"], begin["bytes"]) == ("owner/tiny", 0.0, 0)
    wanted = sum(len(data) for name, data in hub.files.items() if name != "README.md")
    assert (end["percent"], end["bytes"], end["total_bytes"]) == (100.0, wanted, wanted)
    weights = next(record for record in found if (record["stage"], record["state"]) == ("load_weights", "end"))
    assert (weights["percent"], weights["service"]) == (100.0, "generation")
    assert 0 < weights["bytes"] <= len(hub.files["model.safetensors"])


@pytest.mark.slow
async def test_a_tree_writes_records_where_its_log_is_json(hub: Hub) -> None:
    hub.allow(None)
    async with serve(hub, hub.repo, *SMALL, "--log-format", "json") as started:
        await started.until("READY · gRPC")
        assert await started.stop() == 0
    records = [json.loads(line) for line in started.text.splitlines() if line.startswith("{")]
    ends = [record["stage"] for record in records if record["event"] == "progress" and record["state"] == "end"]
    assert [stage for stage in ends if stage != "wait"] == ["download", "load_weights", "tune", "warm_up"]
    assert not [line for line in started.text.splitlines() if line.startswith("downloaded")]


@pytest.mark.parametrize("role", ["tokenizer", pytest.param("generation", marks=pytest.mark.slow)])
async def test_a_start_that_is_stopped_does_not_download_to_the_end(hub: Hub, role: str) -> None:
    flags = SMALL if role == "generation" else ("--port", "0", "--metrics-port", "0")
    async with serve(hub, role, hub.repo, *flags) as started:
        await started.until("downloading owner/tiny: ")
        started.process.send_signal(signal.SIGTERM)
        # The next piece ends it; the last one never comes.
        hub.allow(2 * HUB_CHUNK + 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await started.process.wait() == 0
        assert "READY" not in await started.rest()


@pytest.mark.slow
async def test_a_service_tells_that_another_process_downloads(hub: Hub) -> None:
    async with (
        serve(hub, "generation", hub.repo, *SMALL) as first,
        serve(hub, "tokenizer", hub.repo, "--port", "0", "--metrics-port", "0") as second,
    ):
        started = (first, second)

        async def told(one: Started) -> Started:
            await one.until("downloading|waiting for another process that downloads owner/tiny")
            return one

        await asyncio.gather(*map(told, started))
        assert sorted("waiting" in one.text for one in started) == [False, True]
        hub.allow(None)
        await asyncio.gather(*(one.until("READY") for one in started))
        assert len(hub.sent) == len(set(hub.sent))
        waited = next(one for one in started if "waiting" in one.text)
        assert "another process has downloaded owner/tiny in" in waited.text
