"""Loading of a tokenizer's folder, in the process that does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from penstock.tokenizer.load_process import read_sources_once
from transformers.utils import import_utils


def test_the_names_that_models_export_are_those_that_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Any = import_utils.define_import_structure
    monkeypatch.setattr(import_utils, "define_import_structure", reads)
    misses = reads.cache_info().misses
    init = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    read_sources_once()
    assert reads.cache_info().misses == misses
    given: Any = import_utils.define_import_structure
    assert given is not reads
    assert given(init) == reads(init)
    # Those of one model are its own affair.
    one = str(Path(init).parent / "qwen2" / "__init__.py")
    assert given(one) == reads(one)
