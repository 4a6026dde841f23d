"""Command `penstock pack`: a checkpoint in the layout of the C++ kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from penstock.cli.console import complain, say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.cli.progress_display import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.logging import configure_logging
from penstock.common.options import option, options_of
from penstock.common.progress import CHECK, PACK, StageProgress
from penstock.common.units import format_size

FORMAT, WRITING = "Format", "Writing"
EPILOG = f"""Everything that takes a MODEL takes the folder OUTPUT. Its weights are mapped as
they are: a start copies nothing, and the processes of a host share them.
docs/guide/packed-models.md says when it pays.

{ENV_NOTE}

Examples:

  penstock pack ./my-model ./my-model-int8 --dtype bfloat16 --quantization int8

  penstock serve ./my-model-int8

  penstock pack ./my-model-int8 --check"""

# Tasks of generation.pack.
_STAGES = {"packing": PACK, "checking": CHECK}


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Configuration: the type of the packed weights, and permission to replace files."""

    dtype: str = option("auto", "float32, bfloat16, or auto: the checkpoint's dtype if it runs well.", group=FORMAT)
    quantization: str = option(
        "none", "Pack the weights of the linear layers as int8 or int4; none: as --dtype.", group=FORMAT
    )
    threads: int | None = option(None, "Threads that pack; all cores when left out.", group=WRITING, minimum=1)
    force: bool = option(False, "Replace the model in OUTPUT.", group=WRITING)
    check: bool = option(
        False, "Write nothing: compare the weights of the packed folder MODEL with their digest.", group=WRITING
    )


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


def _pack(given: Overrides) -> None:
    # Standard output is for the result; before this call warnings go there, too.
    configure_logging("pack", level="warning")
    output = given.pop("output", None)
    run_pack(str(given.pop("folder")), None if output is None else str(output), given)


_ARGUMENTS = [
    argument("folder", "MODEL", "Folder or hub id of the checkpoint.", default=...),
    argument("output", "OUTPUT", "Folder to write."),
]
commands = typer.Typer(add_completion=False)
commands.command("pack", epilog=EPILOG)(command(options_of(PackConfig), _pack, first=_ARGUMENTS))
