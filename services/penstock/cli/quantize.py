"""Command `penstock quantize`: a checkpoint with weights of 4 bits, fitted to a calibration text."""

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
from penstock.common.progress import QUANTIZE, StageProgress
from penstock.common.units import format_size

FORMAT, CALIBRATION, WRITING = "Format", "Calibration", "Writing"
GROUP_SIZES = (32, 64, 128)
EPILOG = f"""OUTPUT is a compressed-tensors folder (pack-quantized), a layout that transformers and vLLM have, too.
A run that was stopped goes on behind its last layer. docs/guide/quantised-checkpoints.md says how it works.

{ENV_NOTE}

Examples:

  penstock quantize ./my-model ./my-model-int4

  penstock quantize ./my-model ./my-model-int4 --group-size 32 --calibration texts.txt

  penstock quantize ./my-model ./my-model-mixed --bits 5.5

  penstock serve ./my-model-int4"""


def _group_size(text: str) -> int:
    """Parse a size of groups. Raises ValueError."""
    if text not in map(str, GROUP_SIZES):
        raise ValueError(f"expected one of {', '.join(map(str, GROUP_SIZES))}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Configuration: the form of the weights, the text, and permission to replace files."""

    group_size: int = option(
        64,
        "Inputs that share a scale and a zero: 32 is more exact (4.63 bits a weight), 128 smaller (4.16; 64: 4.31).",
        group=FORMAT,
        metavar="32|64|128",
        parse=_group_size,
    )
    zeros: bool = option(
        True,
        "Give each group a zero of its own: more exact. Without, a weight takes 4.5 (32), 4.25 (64) or 4.13 (128) "
        "bits, and readers that know no zeros read it.",
        group=FORMAT,
    )
    bits: float | None = option(
        None,
        "Most bits of a weight, scales included, in the mean: what 4 bits leave of them goes to the matrices that lose "
        "most, as smaller groups or as 8 bits. By default all have 4.",
        group=FORMAT,
        minimum=4.0,
        maximum=9.0,
    )
    calibration: str | None = option(
        None,
        "File of text (UTF-8) like that which the model will see; by default a small one that ships.",
        group=CALIBRATION,
        metavar="FILE",
    )
    calibration_tokens: int = option(
        16384, "Most tokens of the text; more take longer.", group=CALIBRATION, minimum=64, maximum=1 << 22
    )
    calibration_context: int = option(
        512, "Tokens of a document of the text.", group=CALIBRATION, minimum=16, maximum=1 << 15
    )
    threads: int | None = option(None, "Threads that compute; all cores when left out.", group=WRITING, minimum=1)
    force: bool = option(False, "Replace the model, or the unfinished one, in OUTPUT.", group=WRITING)


def run_quantize(model: str, output: str, given: Overrides) -> None:
    """Write the folder `output`. Raises StartupError."""
    config = from_env_and_flags(QuantizeConfig, given)
    if not output:
        # A shell's unset variable would be the working folder.
        raise StartupError("OUTPUT is missing", flag="OUTPUT")
    # Standard output is for the result.
    display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
    name = model_name(model)
    try:
        folder = resolve_model(model, show=display.show)
        import torch

        from penstock.generation.quantise.quantiser import QuantiseSettings, quantise

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        calibration = None if config.calibration is None else Path(config.calibration).expanduser()
        made = quantise(
            folder,
            Path(output).expanduser(),
            QuantiseSettings(
                config.group_size,
                config.zeros,
                calibration,
                config.calibration_tokens,
                config.calibration_context,
                config.bits,
            ),
            force=config.force,
            progress=lambda done, total: display.show(StageProgress(QUANTIZE, name, done, total, ended=done == total)),
        )
    finally:
        display.close()
    say(f"{made.path}: {format_size(made.num_bytes)}, {made.matrices} matrices of {made.bits:.2f} bits a weight")
    say(f"serve it with: penstock serve {output}")


def _quantize(given: Overrides) -> None:
    # Standard output is for the result; before this call warnings go there, too.
    configure_logging("quantize", level="warning")
    run_quantize(str(given.pop("folder")), str(given.pop("output")), given)


_ARGUMENTS = [
    argument("folder", "MODEL", "Folder or hub id of a checkpoint that is not quantised.", default=...),
    argument("output", "OUTPUT", "Folder to write.", default=...),
]
commands = typer.Typer(add_completion=False)
commands.command("quantize", epilog=EPILOG)(command(options_of(QuantizeConfig), _quantize, first=_ARGUMENTS))
