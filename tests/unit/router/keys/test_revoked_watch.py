"""Keys that are revoked at a router, in a process that only reads the ledger: the parent of `--processes`."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.servers.key_files import secret_of, write_keys
from factories.servers.router import until
from penstock.cli.serve.worker_processes import metrics_tokens_of
from penstock.common.credentials import secret_digest
from penstock.common.errors import StartupError, Unauthenticated
from penstock.router.config import RouterConfig
from penstock.router.keys import ledger_tables
from penstock.router.keys.ledger_database import open_ledger_database
from penstock.router.keys.revoked_watch import RevokedWatch


def config_of(folder: Path, **more: object) -> RouterConfig:
    keys = write_keys(folder / "keys.toml", a={"scopes": ["metrics"]}, b={"scopes": ["metrics"]})
    return RouterConfig(keys_file=keys, ledger=str(folder / "ledger"), ledger_lease_seconds=0.3, **more)  # type: ignore[arg-type]


async def revoke(config: RouterConfig, label: str) -> None:
    """Write down, as a worker does, that a key is revoked."""
    database = open_ledger_database(config)
    await database.open()
    await database.run(lambda rows: ledger_tables.revoke(rows, [secret_digest(secret_of(label).encode())], label))
    await database.close()


async def test_a_key_that_was_revoked_reads_no_metrics_of_several_processes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    await revoke(config, "a")
    async with metrics_tokens_of(config) as tokens:
        assert tokens is not None

        def reads(label: str) -> bool:
            try:
                return tokens.accepts(f"Bearer {secret_of(label)}")
            except Unauthenticated:
                return False

        # Revoked before, and while this process runs.
        assert (reads("a"), reads("b")) == (False, True)
        await revoke(config, "b")
        await until(lambda: not reads("b"))


async def test_a_look_that_breaks_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    async with metrics_tokens_of(config) as tokens:
        assert tokens is not None
        broken: list[object] = []

        def breaks(rows: object) -> None:
            broken.append(rows)
            raise RuntimeError("a fault of our own")

        with monkeypatch.context() as patch:
            patch.setattr(ledger_tables, "revoked", breaks)
            await until(lambda: bool(broken))
        await revoke(config, "b")

        def is_refused() -> bool:
            try:
                tokens.accepts(f"Bearer {secret_of('b')}")
            except Unauthenticated:
                return True
            return False

        await until(is_refused)


async def test_without_keys_or_metrics_there_is_no_ledger_to_open(tmp_path: Path) -> None:
    for config in (RouterConfig(), config_of(tmp_path, metrics_port=-1)):
        async with metrics_tokens_of(config) as tokens:
            assert tokens is None
    assert not (tmp_path / "ledger").exists()


async def test_a_ledger_that_cannot_be_opened_is_told_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("no folder")
    watch = RevokedWatch(config_of(tmp_path))
    with pytest.raises(StartupError) as caught:
        await watch.open()
    assert caught.value.flag == "--ledger"
    await watch.close()
