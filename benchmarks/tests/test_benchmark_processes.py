"""Nothing that a benchmark started outlives it: no service, no child of one, no file in the temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from penstock.common.checkpoint import demo_folder

ROOT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.05, 300.0
# Processes that each has to start before it is stopped: services that are ready, and words of command lines.
SERVICES = ("tokenizer", "generation", "router")
COMMANDS = {
    "workloads": (
        ("--engines", "penstock-grpc", "--workloads", "W1", "--probe-seconds", "0", "--rounds", "100000"),
        SERVICES,
        "benchmarks.engines.worker",
    ),
    "overhead": (("--rounds", "100000"), SERVICES, "serve"),
    "wire": (("--rounds", "100000", "--streams", "1"), ("tokenizer", "router"), "_wire_client.py"),
    "load": (("--models", str(demo_folder()), "--rounds", "100000"), (), "serve"),
}


def children(driver: subprocess.Popen[bytes]) -> dict[psutil.Process, str]:
    """Live processes below the driver, with their command lines."""
    found = {}
    for one in psutil.Process(driver.pid).children(recursive=True):
        try:
            found[one] = " ".join(one.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


# Services are programs, as where a benchmark is run by hand.
BY_HAND = {"PENSTOCK_FORKED_SERVICES": "0"}


@contextmanager
def started(name: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """The benchmark and its children, once those of COMMANDS are there; `folder` is its temporary folder."""
    flags, services, word = COMMANDS[name]
    model = ("--model", str(demo_folder())) if name == "workloads" else ()
    command = [sys.executable, "-m", "benchmarks", name, *flags, *model]
    with (folder.parent / "output").open("w+b") as output:
        driver = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, **BY_HAND, "TMPDIR": str(folder)}
        )
        family: dict[psutil.Process, str] = {}
        try:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not (are_ready(services, folder) and any(word in line for line in family.values())):
                assert time.monotonic() < deadline, family
                with suppress(subprocess.TimeoutExpired):
                    raise AssertionError(driver.wait(_LOOK_SECONDS), Path(output.name).read_text())
                family = children(driver)
            yield driver, list(family)
        finally:
            driver.kill()
            driver.wait()
            for one in family:
                if one.is_running():
                    one.kill()


def are_ready(services: tuple[str, ...], folder: Path) -> bool:
    """True when each of the services has logged that it is ready."""
    logs = [log.read_text() for log in folder.glob("penstock-logs-*/*.log")]
    return all(any(f"READY {service}" in log for log in logs) for service in services)


def gone(processes: list[psutil.Process]) -> bool:
    """True when all end, sooner or later."""
    _, alive = psutil.wait_procs(processes, _PATIENCE_SECONDS)
    return not alive


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_ends_all_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with started(name, folder) as (driver, family):
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(_PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert gone(family)
    assert list(folder.iterdir()) == []


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["workloads", "overhead", "wire", "load"])
def test_services_end_with_a_driver_that_was_killed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with started(name, folder) as (driver, family):
        driver.kill()
        driver.wait()
        assert gone(family)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("wanted", ["kept", "deleted"])
def test_the_log_of_an_engine_is_kept_only_where_it_did_not_end_well(wanted: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    flags = ["--engines", "penstock", "--workloads", "W1", "--probe-seconds", "0", "--rounds", "1", "--warmup", "0"]
    flags += ["--model", str(demo_folder()), "--threads", "1"]
    flags += ["--option", "penstock.kv-memory=no-size"] if wanted == "kept" else []
    command = [sys.executable, "-m", "benchmarks", "workloads", *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **BY_HAND, "TMPDIR": str(folder)},
        check=False,
    )
    logs = list(folder.iterdir())
    if wanted == "kept":
        assert [str(log) in done.stderr for log in logs] == [True]
        assert done.returncode == 1
    else:
        assert done.returncode == 0, done.stderr
        assert logs == []
        assert "W1 decode tok/s" in done.stdout
