"""Command `penstock env`: facts about the machine for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import typer

from penstock.cli.console import say
from penstock.common.environment import cache_folder, system_folder, usable_cores
from penstock.common.units import format_size

PACKAGES = (
    "penstock", "grpcio", "protobuf", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy",
)  # fmt: skip
# CPU features that decide the speed of matrix products.
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
)


def run_env() -> None:
    """Print `name: value` lines."""
    for name, value in facts():
        say(f"{name + ':':<18} {value}")


def facts() -> Iterator[tuple[str, str]]:
    """Return all facts, in order."""
    for package in PACKAGES:
        yield package, _version(package)
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield from _cpu()
    yield from _memory()
    yield from _torch()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> Iterator[tuple[str, str]]:
    info = _fields(Path("/proc/cpuinfo"))
    flags = set(info.get("flags", info.get("Features", "")).split())
    yield "cpu", info.get("model name", platform.processor() or platform.machine())
    yield "cpu flags", " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of interest"
    yield "cores", f"{usable_cores()} usable of {os.cpu_count()}"


def _memory() -> Iterator[tuple[str, str]]:
    info = _fields(Path("/proc/meminfo"))
    if "MemTotal" in info:
        total, available = (int(info[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        yield "memory", f"{format_size(available)} available of {format_size(total)}"
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        yield "memory limit", format_size(int(text))


def _torch() -> Iterator[tuple[str, str]]:
    if util.find_spec("torch") is None:
        yield "devices", "cpu (no torch)"
        return
    import torch

    from penstock.generation.host.cpu_features import describe_onednn

    yield "torch threads", str(torch.get_num_threads())
    yield "torch cpu", torch.backends.cpu.get_cpu_capability()
    yield "onednn", describe_onednn()
    yield "cuda build", torch.version.cuda or "none"
    yield "kernels", _kernels()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "devices", ", ".join(["cpu", *gpus])


def _kernels() -> str:
    """Name the C++ kernels that a service would use."""
    from penstock.generation.devices.native import library
    from penstock.generation.devices.native.build import is_supported
    from penstock.generation.devices.native.prebuilt import how_to_get

    folders = Path(cache_folder()), Path(system_folder())
    path = library.find_first(*folders)
    if path is None:
        how = how_to_get() if is_supported() else f"there are none for {platform.machine()}"
        return f"not built for this version; {how}"
    return f"{library.load(*folders) or 'cannot run here'}, built for this version: {path}"


def _fields(path: Path) -> dict[str, str]:
    """Read `name : value` lines of a /proc file, the first of each name; empty without such a file."""
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


commands = typer.Typer(add_completion=False)
commands.command("env")(run_env)
