"""Rotary position embedding: configuration (old and 5.x form), inverse frequencies, and the rotation itself.

Frequencies, cos and sin are float32 and follow transformers 5.x's modeling_rope_utils.py; "half" rotation: dimension i
turns with dimension i + head_dim / 2. Other rotations are converted to this one when the weights are read
(weights.tensor_names.HeadOrder); dims that do not turn have frequency 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.core.model_config import ConfigReader, RopeConfig

# Positions by which tables of cos and sin grow.
_PIECE = 2048
# Most positions of new tables; longer tables grow.
_MOST_ROOM = 2**18
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def read_rope(config: ConfigReader, max_position_embeddings: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Read RopeConfig from `rope_parameters` (5.x) or `rope_theta` + `rope_scaling` (before).

    Raises StartupError naming the field when a type or parameter is unknown or missing.
    """
    theta = config.number("rope_theta", default_theta)
    # As in transformers, the old name wins where both are present.
    scaling = config.mapping("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.unsupported("partial_rotary_factor", "other than 1 is not supported")
    if scaling is None:
        return RopeConfig("default", theta)
    return read_rope_parameters(config, scaling, max_position_embeddings, theta)


def read_rope_parameters(
    config: ConfigReader, scaling: ConfigReader, max_position_embeddings: int, theta: float
) -> RopeConfig:
    """Read RopeConfig from an object with `rope_type`; its `rope_theta` wins over `theta`. Raises as `read_rope`."""
    theta = scaling.number("rope_theta", theta)
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise scaling.unsupported("rope_type", f"{rope_type!r} is not supported; supported are {supported}")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.unsupported("partial_rotary_factor", "other than 1 is not supported")
    if rope_type == "default":
        return RopeConfig("default", theta)
    original = config.optional_integer("original_max_position_embeddings", minimum=1)
    if original is None:
        original = scaling.integer("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "llama3":
        return _read_llama3(scaling, theta, original)
    if rope_type == "yarn":
        return _read_yarn(scaling, theta, original, max_position_embeddings)
    return RopeConfig(rope_type, theta, factor=scaling.number("factor"))


def _read_llama3(scaling: ConfigReader, theta: float, original: int) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"must be above low_freq_factor ({low}), found {high}")
    return RopeConfig(
        "llama3",
        theta,
        factor=scaling.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(scaling: ConfigReader, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = scaling.number("factor", max_position_embeddings / original)
    if theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1 with yarn, found {theta}")

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.has("attention_factor"):
        attention_factor = scaling.number("attention_factor")
    elif scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        attention_factor = magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    else:
        attention_factor = magnitude()
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=scaling.boolean("truncate", True),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the inverse frequencies (head_dim / 2) in float32, on the CPU.

    "dynamic" equals "default" up to `max_position_embeddings`, where our context ends: beyond it transformers lets the
    longest sequence of a batch change the keys of all the others. A dim that does not turn has 0.
    """
    if rope.rope_type == "proportional":
        # Those that a whole head has.
        turned = (1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)) / rope.factor
        turned = turned[: (rope.rotary_dim or head_dim) // 2]
    else:
        turned = _turning_frequencies(rope, rope.rotary_dim or head_dim)
    return F.pad(turned, (0, head_dim // 2 - len(turned)))


def _turning_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the frequencies of the dims that turn, `head_dim` of them."""
    if rope.rope_type == "longrope":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**exponents)
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    low_wavelength, high_wavelength = context / rope.low_freq_factor, context / rope.high_freq_factor
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, between, scaled)


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    def correction_dim(rotations: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    extrapolation = 1 - ramp
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (rope.factor * base) * (1 - extrapolation) + 1.0 / base * extrapolation


class RotaryEmbedding:
    """cos and sin of a step's positions, once for all layers."""

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, device: torch.device, dtype: torch.dtype, *, max_positions: int
    ) -> None:
        """Make empty tables with room for `max_positions`, unless that is enormous. The system gives memory only for
        positions that are filled. `rope` None: nothing turns."""
        rope = rope or RopeConfig("linear", 1.0, factor=math.inf)
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._scale: float | Tensor = rope.attention_factor
        if rope.rotary_dim:
            self._scale = torch.where(self._inv_freq == 0, 1.0, rope.attention_factor)
        self._scales = rope.attention_factor != 1.0
        self._dtype = dtype
        self._length = 0
        self._make_room(min(max_positions, _MOST_ROOM))

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of at least all positions below `length`, each (positions, head_dim / 2), with the results
        of a call.

        They are kept, and extended in place: head_dim x 2 bytes a position in bfloat16, up to a few percent of the keys
        and values of one sequence of that length. Computing them anew would take 0.3 ms of a decode step.
        """
        if length > self._length:
            self._fill(length)
        return self._tables

    def _fill(self, length: int) -> None:
        """Fill the tables up to `length`, a piece at a time: in float32 all of a long context would take several times
        the tables."""
        end = -(-length // _PIECE) * _PIECE
        if end > len(self._room[0]):
            self._make_room(2 * end)
        for first in range(self._length, end, _PIECE):
            found = self(torch.arange(first, first + _PIECE, device=self._inv_freq.device))
            for table, piece in zip(self._room, found, strict=True):
                table[first : first + _PIECE] = piece.squeeze(1)
        self._length = end
        self._tables = self._room[0][:end], self._room[1][:end]

    @torch.inference_mode(False)
    def _make_room(self, positions: int) -> None:
        """Allocate tables for this number of positions, without filling them."""
        shape = -(-positions // _PIECE) * _PIECE, len(self._inv_freq)
        cos, sin = (torch.empty(shape, dtype=self._dtype, device=self._inv_freq.device) for _ in range(2))
        self._room = cos, sin
        self._length = 0
        self._tables = cos[:0], sin[:0]

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (T, 1, head_dim / 2), computed in float32 and rounded to the model's dtype."""
        angles = positions_T.to(torch.float32).unsqueeze(-1) * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scales:
            cos, sin = cos * self._scale, sin * self._scale
        return cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1)
