"""Requests of many keys while routers and backends are killed: what clients saw, and what the ledger says of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from factories.servers import stack
from factories.servers.key_files import bearer, write_keys
from factories.servers.router import tokenizer_address, tokenizer_fingerprint
from penstock.common.errors import from_rpc_error
from penstock.database.transactions import is_postgres
from penstock.router.keys.ledger_tables import EntryState
from penstock.v1 import common_pb2, config_pb2, text_pb2, text_pb2_grpc

LEASE_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
_MOST_NEW_TOKENS = 24
# Where `-m factories…` is found.
TESTS = Path(__file__).parents[2]


@dataclass
class KeyCall:
    """A request, and what its client saw of the answer."""

    label: str
    request_id: str
    started: bool = False
    tokens: int = 0
    # Usage of a whole answer.
    usage: common_pb2.Usage | None = None
    # Reason of an error with which it ended.
    reason: str = ""
    quota: str = ""

    @property
    def digest(self) -> str:
        """Name of the request in the ledger."""
        return hashlib.sha256(self.request_id.encode()).hexdigest()[:32]


@dataclass
class KeyRun:
    """Two routers that share a ledger, two backends, and clients with keys. Each process may be killed at any time."""

    folder: Path
    # A folder, or the address of a database of PostgreSQL.
    ledger: str
    keys: dict[str, dict[str, Any]]
    seed: int
    routers: list[stack.Process] = field(default_factory=list)
    backends: list[subprocess.Popen[bytes]] = field(default_factory=list)
    calls: list[KeyCall] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    # To each router; those of dead ones are closed at the end.
    _channels: list[grpc.aio.Channel] = field(default_factory=list)
    _old_channels: list[grpc.aio.Channel] = field(default_factory=list)
    # Places of routers that live, as far as clients know.
    _serving: set[int] = field(default_factory=lambda: {0, 1})

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._ports = [stack.free_port() for _ in range(2)]
        self._keys_file = write_keys(self.folder / "keys.toml", **self.keys)

    def _start_backend(self, place: int) -> subprocess.Popen[bytes]:
        flags = ["--port", str(self._ports[place]), "--fingerprint", tokenizer_fingerprint(), "--tokens", "64"]
        command = [sys.executable, "-m", "factories.servers.emitting_backend", *flags, "--step-seconds", "0.002"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=TESTS)

    def _start_router(self) -> stack.Process:
        targets = [word for port in self._ports for word in ("--backend", f"127.0.0.1:{port}")]
        return stack.start(
            "router", "--tokenizer", tokenizer_address(), *targets, "--keys-file", self._keys_file,
            "--ledger", self.ledger, "--ledger-lease-seconds", str(LEASE_SECONDS),
            "--death-verdict-seconds", "0.2", "--reconnect-max-seconds", "0.2",
        )  # fmt: skip

    async def start(self) -> None:
        """Start everything; return when both routers serve."""
        self.backends = [self._start_backend(place) for place in range(2)]
        self.routers = [self._start_router() for _ in range(2)]
        self._channels = [grpc.aio.insecure_channel(router.address) for router in self.routers]
        await asyncio.gather(*(asyncio.to_thread(router.wait_ready) for router in self.routers))

    async def kill_router(self, place: int) -> None:
        """End a router by SIGKILL; another one takes its place."""
        self.kills["router"] += 1
        self.routers[place].popen.kill()
        self._serving.discard(place)
        await asyncio.to_thread(self.routers[place].popen.wait)
        self.routers[place] = router = self._start_router()
        await asyncio.to_thread(router.wait_ready)
        self._old_channels.append(self._channels[place])
        self._channels[place] = grpc.aio.insecure_channel(router.address)
        self._serving.add(place)

    def kill_backend(self, place: int) -> None:
        """End a backend by SIGKILL; another one takes its place."""
        self.kills["backend"] += 1
        self.backends[place].kill()
        self.backends[place].wait()
        self.backends[place] = self._start_backend(place)

    async def stop(self) -> None:
        """End everything."""
        for channel in (*self._channels, *self._old_channels):
            await channel.close()
        for process in self.backends:
            process.kill()
            process.wait()
        for router in self.routers:
            if router.popen.poll() is None:
                router.kill()

    async def ask(self, requests: int, at_once: int) -> None:
        """Send requests of random keys to random routers, and note what came. Some clients leave in the middle."""
        numbers = iter(range(requests))
        first = len(self.calls)

        async def client() -> None:
            for number in numbers:
                await self._call(f"run-{self.seed}-{first + number}")

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _call(self, request_id: str) -> None:
        call = KeyCall(self._random.choice(list(self.keys)), request_id)
        self.calls.append(call)
        most = self._random.randint(1, _MOST_NEW_TOKENS)
        leaves_after = self._random.randint(1, most) if self._random.random() < 0.05 else None
        request = text_pb2.GenerateTextRequest(
            token_ids=common_pb2.TokenIds(ids=[5, 6, 7][: self._random.randint(1, 3)]),
            config=config_pb2.GenerationConfig(max_new_tokens=most),
            output=config_pb2.OutputConfig(return_token_ids=True),
            request_id=request_id,
        )
        channel = self._channels[self._random.choice(sorted(self._serving))]
        stub: Any = text_pb2_grpc.TextServiceStub(channel)
        answer = stub.Generate(request, metadata=bearer(call.label), timeout=PATIENCE_SECONDS)
        try:
            async for message in answer:
                call.started = True
                if message.HasField("delta"):
                    call.tokens += len(message.delta.token_ids)
                    if leaves_after is not None and call.tokens >= leaves_after:
                        call.reason = "LEFT"
                        answer.cancel()
                        return
                elif message.HasField("finished"):
                    call.usage = message.finished.usage
        except grpc.RpcError as error:
            call.reason = from_rpc_error(error).reason
            call.quota = from_rpc_error(error).metadata.get("quota", "")
        except asyncio.CancelledError:
            # grpc's own way to say that the call was cancelled, as above.
            call.reason = call.reason or "CANCELLED"

    async def until_calls(self, number: int) -> None:
        """Wait until clients made so many requests."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.calls) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_at_rest(self) -> None:
        """Wait until no entry is open: routers that live have ended theirs, and took those of dead ones for lost."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.rows("SELECT id FROM key_entries WHERE state = 0"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Ask the ledger's database, past the routers."""
        if is_postgres(self.ledger):
            import psycopg

            with psycopg.connect(self.ledger, autocommit=True) as connection:
                return connection.execute(statement.encode()).fetchall()
        file = f"file:{self.ledger}/ledger.sqlite?mode=ro"
        with contextlib.closing(sqlite3.connect(file, uri=True, timeout=60.0)) as db:
            return db.execute(statement).fetchall()

    def check(self) -> dict[str, Any]:
        """Compare the ledger with what clients saw; return figures. Raises AssertionError."""
        entries: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in self.rows(
            "SELECT request, label, state, reserved, prompt_tokens, completion_tokens, day FROM key_entries"
        ):
            entries[row[0]].append(row[1:])
        assert all(len(found) == 1 for found in entries.values()), "an answer has one entry"
        assert set(entries) <= {call.digest for call in self.calls}, "no entry is without a request"
        seen, sums = Counter[str](), Counter[str]()
        for call in self.calls:
            found = entries.get(call.digest)
            if call.usage is not None:
                assert found is not None, "an answer that a client saw whole is in the ledger"
                ((label, state, _, prompt, completion, _),) = found
                assert (label, state) == (call.label, EntryState.ENDED)
                assert (prompt, completion) == (call.usage.prompt_tokens, call.usage.completion_tokens)
                seen["whole"] += 1
                sums[label] += prompt + completion
            elif found is None:
                assert not call.started, "an answer that began is in the ledger"
                seen["never begun"] += 1
            else:
                ((label, state, reserved, prompt, completion, _),) = found
                used = reserved if state == EntryState.LOST else prompt + completion
                assert used >= call.tokens, "it counts no less than the client got"
                seen["lost" if state == EntryState.LOST else "ended, not seen whole"] += 1
        days = self.rows(
            "SELECT label, day, prompt_tokens + completion_tokens, lost_tokens, reserved, answers FROM key_days"
        )
        for label, day, used, lost, reserved, _ in days:
            quota = self.keys[label].get("tokens_per_day")
            assert quota is None or used + lost <= quota, f"{label} is over its quota"
            ended = sum(p + c for f in entries.values() for (of, s, _, p, c, d) in f if (of, d, s) == (label, day, 1))
            gone = sum(r for f in entries.values() for (of, s, r, _, _, d) in f if (of, d, s) == (label, day, 2))
            assert (used, lost, reserved) == (ended, gone, 0), f"sums of {label} are those of its entries"
        totals = Counter[str]()
        for label, _, used, _, _, _ in days:
            totals[label] += used
        assert all(sums[label] <= totals[label] for label in sums)
        return {
            "requests": len(self.calls),
            "kills": dict(self.kills),
            "clients saw": dict(seen),
            "tokens of whole answers": sum(sums.values()),
            "tokens in the ledger": sum(totals.values()),
            "tokens lost": sum(day[3] for day in days),
            "refused by a quota": sum(call.quota == "tokens_per_day" for call in self.calls),
            "errors": dict(Counter(call.reason for call in self.calls if call.reason)),
        }


@asynccontextmanager
async def key_run(folder: Path, ledger: str, keys: dict[str, dict[str, Any]], seed: int) -> AsyncIterator[KeyRun]:
    """Start a run; nothing is left of it. `ledger`: a folder, or the address of a database."""
    run = KeyRun(folder, ledger, keys, seed)
    try:
        await run.start()
        yield run
    finally:
        await run.stop()
