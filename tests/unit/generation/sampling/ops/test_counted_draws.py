"""The uniforms that draws are made of: a published pure function."""

from __future__ import annotations

import numpy as np
import pytest
from penstock.generation.sampling.ops.counted_draws import Stream, keys_of, stream_keys, uniforms

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _published(seed: int, position: int) -> float:
    """The definition of docs/guide/sampling.md, in plain integers."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((key + _GOLDEN * (position + 1)) & _MASK) >> 11) / 2**53


def _draw(seed: int, position: int) -> float:
    return float(uniforms(stream_keys(np.array([seed], np.uint64)), np.array([position], np.uint64))[0])


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, 0.6524484863740322),
        (0, 1, 0.7012121095215252),
        (1, 0, 0.36818951565166946),
        (42, 7, 0.7347204584623639),
        (2**63 - 1, 131071, 0.6374942878925155),
    ],
)
def test_known_answers(seed: int, position: int, expected: float) -> None:
    assert _draw(seed, position) == expected == _published(seed, position)


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, 0.5687580714419017),
        (0, 1, 0.2954929601720824),
        (42, 7, 0.629585997133906),
        (2**63 - 1, 131071, 0.8125590367143407),
    ],
)
def test_known_answers_of_the_stream_of_xtc(seed: int, position: int, expected: float) -> None:
    keys = keys_of(stream_keys(np.array([seed], np.uint64)), Stream.XTC)
    published = _mix((_mix((seed + _GOLDEN) & _MASK) - _GOLDEN * 1) & _MASK)
    bits = _mix((published + _GOLDEN * (position + 1)) & _MASK) >> 11
    assert float(uniforms(keys, np.array([position], np.uint64))[0]) == expected == bits / 2**53


def test_streams_of_a_seed_are_uncorrelated_and_their_numbers_never_meet() -> None:
    keys, positions = stream_keys(np.full(100_000, 5, dtype=np.uint64)), np.arange(100_000, dtype=np.uint64)
    drawn = [uniforms(keys_of(keys, stream), positions) for stream in Stream]
    assert len({number for one in drawn for number in one.tolist()}) == len(Stream) * len(positions)
    assert np.abs(np.corrcoef(drawn) - np.eye(len(Stream))).max() < 0.012
    assert len({stream.value for stream in Stream.__members__.values()}) == len(Stream.__members__)


def test_vectorised_draws_equal_the_published_function() -> None:
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**63, 500, dtype=np.uint64), rng.integers(0, 2**20, 500, dtype=np.uint64)
    drawn = uniforms(stream_keys(seeds), positions)
    assert drawn.tolist() == [_published(int(seed), int(p)) for seed, p in zip(seeds, positions, strict=True)]


def test_draws_of_a_row_do_not_depend_on_the_other_rows() -> None:
    keys, positions = stream_keys(np.arange(64, dtype=np.uint64)), np.arange(64, dtype=np.uint64)
    together = uniforms(keys, positions)
    assert together.tolist() == [float(uniforms(keys[i : i + 1], positions[i : i + 1])[0]) for i in range(64)]


@pytest.mark.parametrize("axis", ["positions of a seed", "seeds at a position"])
def test_draws_are_uniform_in_twenty_bits(axis: str) -> None:
    count = np.arange(1 << 18, dtype=np.uint64)
    fixed = np.full_like(count, 3)
    seeds, positions = (fixed, count) if axis == "positions of a seed" else (count, fixed)
    drawn = uniforms(stream_keys(seeds), positions)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    for bits in (drawn, drawn * 1024 % 1.0):
        observed = np.bincount((bits * 1024).astype(np.int64), minlength=1024)
        statistic = float(((observed - 256.0) ** 2 / 256.0).sum())
        # Chi-square with 1023 degrees of freedom: p > 0.001 on both sides.
        assert 890 < statistic < 1168


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    seeds = np.arange(100_000, dtype=np.uint64)
    zero, one = np.zeros_like(seeds), np.ones_like(seeds)
    keys = stream_keys(seeds)
    first, following, neighbour = uniforms(keys, zero), uniforms(keys, one), uniforms(stream_keys(seeds + one), zero)
    assert abs(np.corrcoef(first, following)[0, 1]) < 0.012
    assert abs(np.corrcoef(first, neighbour)[0, 1]) < 0.012
