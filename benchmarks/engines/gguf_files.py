"""The GGUF files of a model: as it was published, written by gguf.py, or made of that by llama.cpp's own quantizer.

    python -m benchmarks.engines.gguf_files SOURCE OUT TYPE

is that quantizer, with the Python that has llama-cpp-python.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.engines import PEERS
from benchmarks.engines.base import Settings, Unsupported
from benchmarks.engines.gguf import QUANTIZATIONS, convert

# llama.cpp's names of the mixtures that it makes. Where a matrix's width does not divide into blocks of a type it
# takes another.
QUANTIZED = (
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q4_k_s",
    "q4_k_m",
    "q5_k_s",
    "q5_k_m",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
)
PUBLISHED = "published"


def gguf_file_of(settings: Settings) -> Path:
    """Return the file of `settings.dtype`, made when it is not there. Raises Unsupported for an unknown dtype,
    subprocess.CalledProcessError where the quantizer fails."""
    dtype = settings.dtype
    if dtype == PUBLISHED:
        if not settings.published:
            raise Unsupported("a published GGUF file of this model")
        return Path(settings.published)
    if dtype not in QUANTIZATIONS and dtype not in QUANTIZED:
        raise Unsupported(f"{dtype} as GGUF")
    file = settings.converted(f"{dtype}.gguf")
    if not file.is_file():
        python = Path(settings.cache) / PEERS / "bin" / "python"
        command = [str(python), "-m", __name__, settings.model, str(file), dtype]
        subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])
    return file


def is_gguf(dtype: str) -> bool:
    """True for a format that only a GGUF file has."""
    return dtype == PUBLISHED or dtype in QUANTIZED


def _quantise(source: Path, out: Path, dtype: str) -> None:
    """Write `out` in the mixture `dtype`. Raises RuntimeError where llama.cpp cannot."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{dtype.upper()}")
    unfinished = out.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), params):
        raise RuntimeError(f"llama.cpp does not make {dtype} of {source}")
    unfinished.rename(out)


def _main(model: Path, out: Path, dtype: str) -> None:
    if dtype in QUANTIZATIONS:
        convert(model, out, dtype)
        return
    whole = out.with_name(f"{model.resolve().name}.bf16.gguf")
    if not whole.is_file():
        convert(model, whole, "bf16")
    _quantise(whole, out, dtype)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
