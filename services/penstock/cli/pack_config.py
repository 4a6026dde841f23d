"""Options of `penstock pack`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option

FORMAT, WRITING = "Format", "Writing"


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Configuration: the type of the packed weights, and leave to replace files."""

    dtype: str = option("auto", "float32, bfloat16, or auto: the checkpoint's where it runs well.", group=FORMAT)
    quantization: str = option("none", "Weights of the linear layers as int8 or int4; none: as --dtype.", group=FORMAT)
    threads: int | None = option(None, "Threads that pack; all cores when left out.", group=WRITING, minimum=1)
    force: bool = option(False, "Replace the model in OUTPUT.", group=WRITING)
    check: bool = option(
        False, "Write nothing: compare the weights of MODEL, a packed folder, with their digest.", group=WRITING
    )
