"""Files and table of benchmarks/gguf_beside.py."""

from __future__ import annotations

import gguf

from benchmarks.__main__ import parser_of
from benchmarks.engines.gguf_files import PUBLISHED, QUANTIZED, is_gguf
from benchmarks.gguf_beside import COLUMNS, READERS, cells


def test_every_mixture_is_one_of_llamacpp() -> None:
    known = {one.name for one in gguf.LlamaFileType}
    assert {f"MOSTLY_{name.upper()}" for name in QUANTIZED} <= known
    assert all(map(is_gguf, (PUBLISHED, *QUANTIZED)))
    assert not any(map(is_gguf, ("bf16", "int8")))


def test_all_files_are_read_unless_some_are_named() -> None:
    assert parser_of("gguf_beside").parse_args([]).types == [PUBLISHED, *QUANTIZED]
    assert parser_of("gguf_beside").parse_args(["--types", "q8_0"]).types == ["q8_0"]


def test_a_row_has_every_readers_errors_from_the_file_and_from_the_model() -> None:
    found = {title: {"error": number / 100, "agreement": 0.9} for number, title in enumerate(READERS)}
    row = {"model": "m", "file": "q8_0", "types": "1 Q8_0", "bits": 8.5}
    shown = cells({**row, "from_the_file": found, "from_the_model": found})
    assert len(shown) == len(COLUMNS)
    assert shown[:4] == ["m", "q8_0", "1 Q8_0", "8.50"]
    assert shown[4:7] == ["0.0000, 90.0%", "0.0100, 90.0%", "0.0200, 90.0%"]
