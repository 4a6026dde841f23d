"""Command `penstock pack`: a checkpoint in the layout of the C++ kernels."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.cli.console import complain, say
from penstock.cli.flags import Overrides
from penstock.cli.pack_config import PackConfig
from penstock.cli.progress import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.progress import CHECK, PACK, StageProgress
from penstock.common.units import format_size

# Tasks of generation.pack.
_STAGES = {"packing": PACK, "checking": CHECK}


def run_pack(model: str, output: str | None, given: Overrides) -> None:
    """Write the folder `output`, or with --check verify `model`. Raises StartupError."""
    config = from_env_and_flags(PackConfig, given)
    # An empty path, such as a shell's unset variable, would be the working folder.
    if config.check == bool(output):
        wanted = "--check takes no OUTPUT: nothing is written" if config.check else "OUTPUT is missing"
        raise StartupError(wanted, flag="OUTPUT")
    # Standard output is for the result.
    display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
    name = model_name(model)

    def report(task: str, done: int, total: int) -> None:
        display.show(StageProgress(_STAGES[task], name, done, total, ended=done == total))

    try:
        folder = resolve_model(model, show=display.show)
        from penstock.generation import pack as packing

        if not output:
            packed = packing.check(folder, report)
        else:
            packed = packing.pack(
                folder,
                Path(output).expanduser(),
                dtype=config.dtype,
                quantization=config.quantization,
                threads=config.threads,
                force=config.force,
                progress=report,
            )
    finally:
        display.close()
    facts = packed.facts
    say(f"{packed.path}: {format_size(packed.num_bytes)}, {facts.dtype}, quantization {facts.quantization}, whole")
    if output:
        say(f"serve it with: penstock serve {output}")
