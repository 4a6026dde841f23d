"""Commands `penstock build-kernels`, the optional C++ kernels, and `penstock doctor`, what a device computes."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from penstock.cli.console import say
from penstock.common.environment import cache_folder, system_folder
from penstock.common.units import format_size

# Seconds between lines of progress without a terminal.
PROGRESS_SECONDS = 10.0


def run_build_kernels(*, system: bool) -> None:
    """Build into the user's cache or the environment's folder, load, and print the kernels. Raises StartupError."""
    from penstock.generation.devices.native import library
    from penstock.generation.devices.native.build import build
    from penstock.generation.devices.native.build_cache import UNUSED_DAYS, remove_unused

    folder = Path(system_folder() if system else cache_folder())
    signal.signal(signal.SIGTERM, _stop)
    # An environment is often that of an image, which may run on another CPU.
    path = build(folder, everywhere=system, progress=BuildProgress())
    found = library.load(folder)
    say(f"{found} kernels: {path}" if found else f"built, but this CPU has no AVX2: {path}")
    freed = remove_unused(folder, path)
    if freed:
        say(f"removed builds that were not used for {UNUSED_DAYS} days: {format_size(freed)}")


def run_doctor(device_name: str, dtype_name: str) -> int:
    """Examine a device and print a line for each operation; return the exit code. Raises StartupError."""
    from penstock.generation.devices.device_registry import open_device
    from penstock.generation.devices.doctor import examine
    from penstock.generation.devices.torch_dtypes import named_dtype

    dtype = named_dtype(dtype_name)
    device = open_device(device_name)
    device.start()
    say(device.describe())
    wrong = 0
    for finding in examine(device, dtype):
        wrong += not finding.is_right
        mark = "ok" if finding.is_right else "WRONG"
        say(f"{mark:<6} {finding.name:<24} {finding.error or f'{finding.difference:.5f}'}")
    say("every operation gives the CPU's numbers" if not wrong else f"{wrong} operations do not give the CPU's numbers")
    return 1 if wrong else 0


class BuildProgress:
    """Shows how many files are compiled: on a terminal one line that changes, elsewhere a line every 10 s."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = 0.0
        self._is_terminal = sys.stdout.isatty()

    def __call__(self, done: int, files: int) -> None:
        """Show it, if it is time."""
        seconds = time.monotonic() - self._began
        if done == 0:
            say(f"compiling {files} files for this machine's torch: about a minute on two cores")
        text = f"  {done} of {files} files after {seconds:.0f} s"
        if self._is_terminal:
            sys.stdout.write(f"\r{text}" + ("\n" if done == files else ""))
            sys.stdout.flush()
        elif done and (done == files or seconds - self._told >= PROGRESS_SECONDS):
            say(text)
            self._told = seconds


def _stop(number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: compilers are stopped, and their files removed."""
    sys.exit(128 + number)


build_command = typer.Typer(add_completion=False)
doctor_command = typer.Typer(add_completion=False)


@build_command.command("build-kernels")
def _build(
    system: Annotated[
        bool, typer.Option("--system", help="For all users of this Python environment, as in an image.")
    ] = False,
) -> None:
    run_build_kernels(system=system)


@doctor_command.command("doctor")
def _doctor(
    device: Annotated[str, typer.Option(help="Device to examine, as the generation service's --device.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Number format: bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    raise typer.Exit(run_doctor(device, dtype))
