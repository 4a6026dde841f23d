"""The C++ kernels against torch's operators, over random shapes, on every instruction set that the CPU has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from factories.native import INSTRUCTION_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionMetadata, HeadWeights
from penstock.generation.attention.native import NativeAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.models.kernels import LayerKernels, NativeKernels
from penstock.generation.native import build, library
from penstock.generation.runner.kv_cache import KVCachePool

# Largest difference of a result, relative to the largest of the reference: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
dtypes = st.sampled_from(library.DTYPES)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype is expected.dtype
    limit = TOLERANCE[expected.dtype] * max(1.0, float(expected.float().abs().max()))
    assert float((found.float() - expected.float()).abs().max()) <= limit


@st.composite
def steps(draw: st.DrawFn) -> dict[str, object]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    lens = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 150)), min_size=1, max_size=5))
    return {
        "query_lens": [query for query, _ in lens],
        "kv_lens": [query + before for query, before in lens],
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([2, 6, 16, 64, 80, 128, 256])),
        "block_size": draw(st.sampled_from([1, 3, 16, 32])),
        "window": draw(st.sampled_from([None, None, 1, 7, 64, 100])),
        "seed": draw(st.integers(0, 1000)),
    }


def one_step(dtype: torch.dtype, step: dict) -> tuple[KVCachePool, AttentionMetadata, torch.Tensor, torch.Tensor]:
    """A pool of NaN but for what a sequence has computed, metadata, qkv of the rows, positions."""
    torch.manual_seed(step["seed"])
    size, kv_lens = step["block_size"], step["kv_lens"]
    counts = [-(-length // size) for length in kv_lens]
    kv = KVCachePool(1, sum(counts) + 2, size, step["kv_heads"], step["head_dim"], dtype, torch.device("cpu"))
    kv.key(0).fill_(float("nan"))
    kv.value(0).fill_(float("nan"))
    blocks = torch.randperm(kv.num_blocks, dtype=torch.int32).split([*counts, 2])[:-1]
    tables = torch.zeros((len(kv_lens), max(counts)), dtype=torch.int32)
    for table, own, length, query in zip(tables, blocks, kv_lens, step["query_lens"], strict=True):
        table[: len(own)] = own
        before = torch.arange(length - query)
        slots = own[before // size].long() * size + before % size
        for pool in (kv.key(0), kv.value(0)):
            pool.view(kv.num_slots, -1)[slots] = torch.randn(len(slots), pool[0, 0].numel()).to(dtype)
    metadata, positions = AttentionMetadata.build(step["query_lens"], kv_lens, tables, size)
    width = (step["heads"] + 2 * step["kv_heads"]) * step["head_dim"]
    return kv, metadata, torch.randn(sum(step["query_lens"]), width).to(dtype), positions


@settings(max_examples=60, deadline=None)
@given(dtype=dtypes, step=steps(), has_norm=st.booleans())
def check_attention(dtype: torch.dtype, step: dict, has_norm: bool) -> None:
    kv, metadata, qkv, positions = one_step(dtype, step)
    angles = positions[:, None] / 100.0 ** torch.linspace(0, 1, step["head_dim"] // 2)
    cos, sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]
    norms = [torch.randn(step["head_dim"]).to(dtype) for _ in "qk"] if has_norm else []
    heads = HeadWeights(step["heads"], step["kv_heads"], step["head_dim"], *norms, eps=1e-6)
    found: list[torch.Tensor] = []
    for attention in (SDPAAttention(), NativeAttention()):
        metadata.plans.clear()
        scale = step["head_dim"] ** -0.5
        found.append(attention.forward_qkv(qkv, cos, sin, heads, 0, metadata, kv, scale, step["window"]))
        slots = metadata.slot_mapping
        found += [kv.key(0).view(kv.num_slots, -1)[slots], kv.value(0).view(kv.num_slots, -1)[slots]]
    for native, reference in zip(found[3:], found[:3], strict=True):
        assert_close(native, reference)


def test_attention_reads_and_writes_the_pool_as_the_reference_does() -> None:
    check_attention()


@settings(max_examples=60, deadline=None)
@given(dtype=dtypes, rows=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 1000))
def check_rows(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, x = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(width).to(dtype), (3 * torch.randn(rows, 2 * width)).to(dtype)
    streams = [hidden.clone(), hidden.clone()]
    normed = [
        kernels.add_rms_norm(stream, x, weight, 1e-6)
        for kernels, stream in zip((LayerKernels(), NativeKernels()), streams, strict=True)
    ]
    assert torch.equal(*streams)
    assert_close(normed[1], normed[0])
    assert_close(NativeKernels().silu_mul(gate_up), LayerKernels().silu_mul(gate_up))


def test_norm_and_swiglu_are_those_of_the_reference() -> None:
    check_rows()


def test_a_nan_stays_one() -> None:
    hidden = torch.zeros(2, 40)
    hidden[1, 3] = torch.nan
    normed = NativeKernels().add_rms_norm(hidden, torch.ones(2, 40), torch.ones(40), 1e-6)
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()
    activated = NativeKernels().silu_mul(torch.cat((hidden, torch.ones(2, 40)), dim=1))
    assert activated.isnan().sum() == 1


def test_impossible_arguments_are_refused_not_read() -> None:
    with pytest.raises(RuntimeError):
        NativeKernels().add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(4), 1e-6)
    with pytest.raises(RuntimeError):
        NativeKernels().silu_mul(torch.zeros(2, 3))


def test_the_library_is_built_once_for_each_version_of_its_sources(tmp_path: Path) -> None:
    path = build.library_path(tmp_path)
    assert library.load(tmp_path) is None
    path.parent.mkdir()
    path.write_bytes(b"")
    assert build.build(tmp_path, compiler="/nowhere") == path
    # In a process that has none yet: what is no library is passed over.
    script = "import pathlib, sys; from penstock.generation.native import library; "
    code = script + "print(library.load(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "None"
    with pytest.raises(StartupError, match="compiled"):
        build.build(tmp_path / "other", compiler="/bin/false")
