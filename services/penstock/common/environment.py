"""Environment of the process: the only module that uses `os.environ`. It imports nothing, and may run before grpc."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from importlib import util

ENV_PREFIX = "PENSTOCK_"
# The Ascend runtime numbers the devices that it lists, in order, from 0.
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
_HUB_OFF = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def quiet_environment(threads: int | None = None) -> dict[str, str]:
    """Variables that native libraries read on loading; set them before torch or grpc is imported.

    OpenMP threads sleep between parallel regions instead of spinning, so that other processes on the machine get the
    cores. oneDNN keeps the kernels of the last 128 shapes instead of 1024, which costs no time and saves memory
    (docs/guide/performance.md). grpc's C core does not write to stderr, and torch's writes only errors; Python's
    warnings from torch go into the log. Values that the operator has set are kept.
    """
    wanted = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_VERBOSITY": "NONE",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def prepare_environment(threads: int | None = None) -> None:
    """Put `quiet_environment` into this process; call it before importing torch or grpc."""
    os.environ.update(quiet_environment(threads))


def child_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Environment of a child process: this one's without the variables `without`, quiet, with unbuffered output."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    return {**inherited, **quiet_environment(), "PYTHONUNBUFFERED": "1"}


def current_environment() -> Mapping[str, str]:
    """Environment that PENSTOCK_* variables are read from."""
    return os.environ


def torch_cpu_capability() -> str | None:
    """Highest vector instructions in torch's own loops: "default", "avx2" or "avx512". None: no limit."""
    return os.environ.get("ATEN_CPU_CAPABILITY")


def cache_folder() -> str:
    """Folder for files that can be rebuilt."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "penstock")


def is_hub_off() -> bool:
    """True when huggingface_hub's own variable forbids requests to the hub."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _HUB_OFF)


def hub_cache_folder() -> str:
    """Folder of huggingface_hub's cache, as its own variables set it."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return os.path.expanduser(cache)
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.expanduser(os.path.join(os.environ.get("HF_HOME") or os.path.join(root, "huggingface"), "hub"))


def system_folder() -> str:
    """Folder like `cache_folder`, but for all users of this Python environment: an image's build stage fills it."""
    return os.path.join(sys.prefix, "share", "penstock")


def num_npus() -> int:
    """Number of Ascend NPUs that this process may use: those with a device file in /dev, which the driver or the
    container's runtime puts there, and listed in ASCEND_RT_VISIBLE_DEVICES. 0 without torch-npu."""
    if util.find_spec("torch_npu") is None:
        return 0
    try:
        files = os.listdir("/dev")
    except OSError:
        return 0
    found = sum(name.startswith("davinci") and name.removeprefix("davinci").isdigit() for name in files)
    listed = os.environ.get(VISIBLE_NPUS)
    return found if listed is None else min(found, sum(bool(part.strip()) for part in listed.split(",")))


def may_have_gpu() -> bool:
    """True unless no driver of a GPU has put its device file into /dev; torch alone knows what a GPU can do."""
    return any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "dxg", "kfd", "nvhost-gpu", "nvgpu"))


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
