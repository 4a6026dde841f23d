"""Tests are of this tree, whatever is installed, and find tests/factories as `factories`, however pytest is started."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest

_TESTS = Path(__file__).parent
_PACKAGES = [str(_TESTS.parent / part) for part in ("services", "clients/python")]
sys.path[:0] = [str(_TESTS), *_PACKAGES]
# For the processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*_PACKAGES, os.environ.get("PYTHONPATH"))))
# Before a test imports rich: structlog would have it write tracebacks with all variables, in half a second each.
importlib.import_module("penstock.common.logging")
# Several trees run at a time: a gateway is part of those that ask for it.
os.environ.setdefault("PENSTOCK_HTTP_PORT", "-1")
# Tests start hundreds of processes: each would take a second to find its batch size.
os.environ.setdefault("PENSTOCK_TUNE_SECONDS", "0")
# And each tokenizer would start two processes for templates, which take longer than the rest of it.
os.environ.setdefault("PENSTOCK_TEMPLATE_PROCESSES", "1")
# Nor do Penstock's programs import torch, each for two seconds: see factories/servers/forked.py.
os.environ.setdefault("PENSTOCK_FORKED_SERVICES", "1" if sys.platform == "linux" else "0")
# Services load the C++ kernels that the tests compile (`pytest_sessionstart`), not those that the user may have, from a
# cache of the tests alone. It is set here, since the fork server's environment must be that of its services.
if "PENSTOCK_TEST_KERNELS_HOME" not in os.environ:
    _cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"
    os.environ["PENSTOCK_TEST_KERNELS_HOME"] = os.environ["XDG_CACHE_HOME"] = str(_cache)
# Without a GPU Triton, where it is installed, interprets its kernels; it asks for this when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# And each would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before torch is imported: threads of several workers take each other's cores, and small products gain nothing by them.
# The kernels' tests have two (`use_instruction_set`), and so has what sets a number of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# From here on, since tests start them by subprocess and by asyncio.
if os.environ["PENSTOCK_FORKED_SERVICES"] == "1":
    _forked = importlib.import_module("factories.servers.forked")
    _forked.fork_programs(_forked.ForkServer().fork)
# On a busy machine an example that takes long, or is made slowly, is not a failure.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("penstock", max_examples=25, deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("penstock")
# It would parse all of our modules for numbers and texts to draw, two seconds of each worker of a fresh clone, and sift
# 4,000 of them for each strategy. What is near an edge of ours the strategies name.
importlib.import_module("hypothesis.internal.conjecture.providers").is_local_module_file = lambda path: False
# HTTP clients share what they trust, which takes 60 ms of processor to read: tests make hundreds of them.
if importlib.util.find_spec("httpcore2") is not None:
    _http: Any = importlib.import_module("httpcore2")
    _http.default_ssl_context = functools.cache(_http.default_ssl_context)
# Where no run has compiled the C++ kernels, the first test that needs them does: a minute, several on a busy machine.
_WITH_COMPILATION_SECONDS = 900


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --device: models of the tests run on the CPU, or through another device's operators, which are emulated."""
    parser.addoption(
        "--device", choices=("cpu", "npu", "cuda"), default="cpu", help="npu, cuda: their operators, emulated"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the C++ kernels before workers start: so all services of a run have them, from its first test on.

    A run of one process, or of files alone, takes those that are there.
    """
    config = session.config
    folders = any(Path(argument).is_dir() for argument in config.args)
    if hasattr(config, "workerinput") or not (config.getoption("numprocesses", None) and folders):
        return
    # Those of another build are brought by who asks for them: see `cache_home` of factories/models/native.py.
    brought = os.environ["PENSTOCK_TEST_KERNELS_HOME"] != os.environ.get("XDG_CACHE_HOME")
    if brought or config.option.collectonly or "not kernels" in config.option.markexpr:
        return
    report: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    say = report.write_line if report else print
    say("compiling the C++ kernels, where these sources were not compiled before: a minute")
    # In a program of its own: this process needs no torch, and nothing else to fork.
    command = (sys.executable, "-m", "penstock.cli.main", "build-kernels")
    alone = {**os.environ, "PENSTOCK_FORKED_SERVICES": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=alone)
    if done.returncode:
        say(f"{done.stdout.strip()}\nservices run on torch's operators; tests of the kernels are skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Tell factories/models/run_kernels.py the device."""
    os.environ["PENSTOCK_TESTED_DEVICE"] = config.getoption("--device")
    # xdist 3.8 puts a test's group into this field. Without it every worker would start every file's servers.
    has_groups = any("_nodeid" in getattr(kind, "__slots__", ()) for kind in pytest.Item.__mro__)
    if config.getoption("dist", "no") == "loadgroup" and not has_groups:
        raise pytest.UsageError("pytest-xdist cannot group the tests of this pytest: take those of pyproject.toml")


def _turned_files(config: pytest.Config) -> list[str]:
    """Arguments of a worker: the files of the folders that are asked for, each worker's from another place on.

    pytest rewrites the assertions of a file that has changed, all of a fresh clone, and keeps the result: of several
    workers that read files in one order each would do all of it, ten seconds of processor.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    folders = [Path(argument) for argument in config.args]
    if worker is None or not all(folder.is_dir() for folder in folders):
        return config.args
    files = [str(file) for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    return files[first:] + files[:first]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leave what stays until the end, millions of objects of modules and tests, out of the garbage collector's rounds:
    they cost a third of the collection of tests, a quarter of those that unload models."""
    session.config.args = _turned_files(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # A service takes back what it froze before it collects an unloaded model. Here that would be all of this: the
        # services that are processes of their own do it.
        gc.freeze = gc.unfreeze = lambda: None
        # Python's own first threshold is 700. Its rounds took a twentieth of what was left.
        gc.set_threshold(50_000, 20, 50)


# Files of tests/unit that read, build or start much have few tests, and long ones: they are the first of them.
_LONG_UNITS = tuple(f"tests/unit/{folder}/" for folder in ("deploy", "docs", "rules", "tools"))


def _turn(file: Path, num_tests: int) -> tuple[bool, int, str]:
    """Order of files: those of processes and those that compute mixed by chance, so that what waits is beside what
    does not; at the end those of tests/unit, the shortest last, for workers wait for the one that ends last."""
    path = file.relative_to(_TESTS.parent).as_posix()
    if not path.startswith("tests/unit/"):
        return False, crc32(path.encode()), path
    return True, -sys.maxsize if path.startswith(_LONG_UNITS) else -num_tests, path


# Before xdist's own, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark files of the kernels, give them more time, and keep a file's tests, which share servers, on one worker.
    Of a test marked `thinned(n)` leave every n-th set of parameters to the ordinary run; the others are slow."""
    turns = {file: _turn(file, num_tests) for file, num_tests in Counter(item.path for item in items).items()}
    items.sort(key=lambda item: turns[item.path])
    # A file's marks are its tests', and each worker has thousands of these.
    for file in {item.getparent(pytest.Module) for item in items} - {None}:
        if any(hasattr(file.obj, name) for name in ("use_native", "use_instruction_set", "use_packing")):
            file.add_marker(pytest.mark.kernels)
            file.add_marker(pytest.mark.timeout(_WITH_COMPILATION_SECONDS))
        file.add_marker(pytest.mark.xdist_group(str(file.path)))
    thinned: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        # What is slow already is not counted: of the rest every n-th stays.
        if item.get_closest_marker("thinned") and not item.get_closest_marker("slow"):
            thinned[item.path, getattr(item, "originalname", item.name)].append(item)
    for sets in thinned.values():
        # In an order of chance, that of the names' sums: neighbours differ in their last parameter only.
        for number, item in enumerate(sorted(sets, key=lambda one: crc32(one.name.encode()))):
            if number % item.get_closest_marker("thinned").args[0]:  # type: ignore[union-attr]
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def logging_of_its_own() -> Iterator[None]:
    """Undo what a file's tests configured: after a Generator, which is quiet, others would wait in vain for lines."""
    yield
    if (structlog := sys.modules.get("structlog")) is not None:
        structlog.reset_defaults()
