"""Sweep of the installed transformers: every model that scales scores by a position's number is one that is looked at.

The self-check runs short sequences. A constant such as Llama 4's `floor_scale` of 8,192 acts behind them, so the check
must cut it, or the scale must act from the first position on.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import transformers
from penstock.generation.models import self_check

MODELS = Path(transformers.__file__).parent / "models"
_LOGARITHM = re.compile(r"torch\.log(?:1p|2)?\(|\.log(?:1p|2)?\(\)")
_POSITIONS = re.compile(r"posit|effective_n|floor_scale|max_exact|num_buckets", re.IGNORECASE)
_LENGTH = re.compile(r"\.get_seq_length\(self\.layer_idx")
# Sizes that the check cuts: the modules have one of them.
CUT = ("inkling", "inkling2", "inkling2_loop", "llama4", "ministral3", "mistral4")
# Scales from the first position on, by `position_ids`: the check sees it.
FROM_THE_FIRST = ("beam", "mistral_large4")
# Biases by distance, in buckets, of encoders of texts, pictures and sound, and of decoders that are refused.
BUCKETS = (
    *("cpmant", "deberta_v2", "layoutlmv2", "layoutlmv3", "longt5", "mpnet", "mt5", "pix2struct", "pop2piano"),
    *("pp_doclayout_v2", "prophetnet", "sew_d", "swin2sr", "swinv2", "switch_transformers", "t5", "udop", "umt5"),
    *("wavlm", "zoedepth"),
)
# Layers that ask a cache how many tokens it has seen: Llama 4's have theirs from `row_positions`, the others belong to
# encoder-decoders or ask for their encoder's.
ASKING = (
    *("big_bird", "bigbird_pegasus", "llama4", "longt5", "mt5", "pix2struct", "pop2piano", "switch_transformers"),
    *("t5", "udop", "umt5"),
)


@cache
def sources() -> dict[str, str]:
    """Each model's file, by the model's folder."""
    found = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(MODELS.glob("*/modeling_*.py"))}
    assert len(found) > 100
    return found


def statements(source: str, pattern: re.Pattern[str]) -> list[str]:
    """Lines with a match, each with the two before and behind it, since formatters break expressions."""
    lines = source.splitlines()
    return ["\n".join(lines[max(0, at - 2) : at + 3]) for at, line in enumerate(lines) if pattern.search(line)]


def test_every_model_with_a_logarithm_of_positions_is_known() -> None:
    found = {
        name
        for name, source in sources().items()
        if any(_POSITIONS.search(text) for text in statements(source, _LOGARITHM))
    }
    known = {*CUT, *FROM_THE_FIRST, *BUCKETS}
    assert found - known == set(), "look at each: does the self-check reach what its constant does?"
    assert (known & sources().keys()) - found == set(), "no longer in transformers: take them out"


def test_every_layer_that_asks_a_caches_length_is_known() -> None:
    found = Counter({name: len(_LENGTH.findall(source)) for name, source in sources().items()})
    assert {name for name, count in found.items() if count} == {*ASKING} & sources().keys()


@pytest.mark.parametrize("name", CUT)
def test_the_check_cuts_the_constant(name: str) -> None:
    if name not in sources():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    sizes = (*self_check._SIZES, self_check._ROPE_SCALING)
    assert any(size in sources()[name] for size in sizes if size not in ("sliding_window", "index_topk"))
