"""Number formats by the words of flags."""

from __future__ import annotations

import pytest
from penstock.evaluation.number_format import NumberFormat


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("auto", NumberFormat()),
        ("int8", NumberFormat("auto", "int8", "auto")),
        ("bfloat16", NumberFormat("bfloat16", "auto", "auto")),
        ("bfloat16+int4+kv-int8", NumberFormat("bfloat16", "int4", "int8")),
        ("kv-int8+float32", NumberFormat("float32", "auto", "int8")),
    ],
)
def test_words_in_any_order(text: str, format: NumberFormat) -> None:
    assert NumberFormat.parse(text) == format


@pytest.mark.parametrize("text", ["", "int8+", "kv-", "int8+int4", "float32+bfloat16", "kv-int8+kv-auto"])
def test_a_word_that_is_missing_or_there_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected words|are both a"):
        NumberFormat.parse(text)


@pytest.mark.parametrize("text", ["int9", "bfloat16+foo", "kv-int4", "fp8", "kv-bfloat16"])
def test_an_unknown_word_is_refused(text: str) -> None:
    """It was refused only behind the reference, after minutes."""
    word = text.rpartition("+")[2]
    with pytest.raises(ValueError, match=f"^{word}: expected auto, "):
        NumberFormat.parse(text)
