"""Command `penstock pack`: a checkpoint in the layout of the C++ kernels."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.console import say
from penstock.cli.flags import Overrides
from penstock.cli.pack_config import PackConfig
from penstock.common.checkpoint import resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.generation.pack import Progress


def run_pack(model: str, output: str | None, given: Overrides) -> None:
    """Write the folder `output`, or with --check verify `model`. Raises StartupError."""
    config = from_env_and_flags(PackConfig, given)
    # An empty path, such as a shell's unset variable, would be the working folder.
    if config.check == bool(output):
        wanted = "--check takes no OUTPUT: nothing is written" if config.check else "OUTPUT is missing"
        raise StartupError(wanted, flag="OUTPUT")
    folder = resolve_model(model, progress=say)
    from penstock.generation import pack as packing

    with _bar() as progress:
        if not output:
            packed = packing.check(folder, progress)
        else:
            packed = packing.pack(
                folder,
                Path(output).expanduser(),
                dtype=config.dtype,
                quantization=config.quantization,
                threads=config.threads,
                force=config.force,
                progress=progress,
            )
    facts = packed.facts
    say(f"{packed.path}: {format_size(packed.num_bytes)}, {facts.dtype}, quantization {facts.quantization}, whole")
    if output:
        say(f"serve it with: penstock serve {output}")


@contextmanager
def _bar() -> Iterator[Progress]:
    """Show a bar for each task on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done)

        yield report
