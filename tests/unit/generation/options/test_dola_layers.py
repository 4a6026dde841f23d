"""transformers' names for DoLa's candidate layers, as numbers."""

from __future__ import annotations

import pytest
from penstock.common.errors import InvalidArgument
from penstock.generation.options.mode_options import candidate_layers


@pytest.mark.parametrize(
    ("layers", "num_layers", "tied", "expected"),
    [
        ("low", 24, False, (0, 2, 4, 6, 8, 10)),
        ("low", 24, True, (2, 4, 6, 8, 10)),
        ("high", 24, True, (12, 14, 16, 18, 20, 22)),
        ("high", 7, False, (3, 5)),
        ("low", 40, False, tuple(range(0, 20, 2))),
        ("high", 40, False, tuple(range(20, 40, 2))),
        ("low", 80, True, tuple(range(2, 20, 2))),
        ("high", 81, False, tuple(range(61, 81, 2))),
        # Shallow models.
        ("low", 4, True, (2,)),
        ("low", 2, True, (1,)),
        ("low", 1, True, (0,)),
        ("low", 1, False, (0,)),
        ("low", 2, False, (0,)),
        ([5, 1, 1, 30, 8], 8, False, (5, 1)),
    ],
)
def test_candidates_are_those_of_the_last_release_that_had_dola(
    layers: str | list[int], num_layers: int, tied: bool, expected: tuple[int, ...]
) -> None:
    assert candidate_layers(layers, num_layers, tied=tied) == expected


@pytest.mark.parametrize(
    ("layers", "num_layers", "tied"),
    [("middle", 8, False), ([8, 9], 8, False), ([], 8, False), ([-1], 8, False), ("low", 3, True)],
)
def test_what_leaves_no_candidate_is_refused_by_name(layers: str | list[int], num_layers: int, tied: bool) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.dola_layers"):
        candidate_layers(layers, num_layers, tied=tied)
