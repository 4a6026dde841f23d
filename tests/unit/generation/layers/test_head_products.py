"""Products of heads: the kernels' one call has the bits of a packed product of each head, in any batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from factories.models.kernels import assert_close
from factories.models.native import PRODUCT_SETS, use_instruction_set
from penstock.generation.layers.head_products import BatchedProducts, HeadCopies, PackedProducts, head_products
from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels
from penstock.generation.layers.linear.native import Format, NativeLinearMethod
from torch import Tensor

HEADS = 3


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


def part_of_wider(seed: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers of heads that lie among others, as a query's plain dims do."""
    return drawn(seed, rows, HEADS, size + 6, dtype=dtype)[..., 2 : size + 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 8), (48, 20), (7, 34), (160, 128)])
@pytest.mark.parametrize("rows", [1, 2, 9, 70])
def test_each_head_has_the_bits_of_its_own_product(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    weight = drawn(1, HEADS, outputs, inputs, dtype=dtype)
    x = part_of_wider(2, rows, inputs, dtype)
    method = NativeLinearMethod(Format.BF16 if dtype is torch.bfloat16 else Format.F32)
    around = torch.full((rows, HEADS, outputs + 5), 3.0, dtype=dtype)
    PackedProducts(weight)(x, around[..., 1 : outputs + 1])
    for head in range(HEADS):
        own = method.linear(weight[head], None)(x[:, head].contiguous())
        assert torch.equal(around[:, head, 1 : outputs + 1], own)
    # Nothing beside a head's outputs is written.
    assert (around[..., 0] == 3).all()
    assert (around[..., outputs + 1 :] == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    products = PackedProducts(drawn(1, HEADS, 40, 24, dtype=dtype))
    x = drawn(3, 300, HEADS, 24, dtype=dtype)
    together = torch.empty(300, HEADS, 40, dtype=dtype)
    products(x, together)
    for row in (0, 7, 299):
        alone = torch.empty(1, HEADS, 40, dtype=dtype)
        products(x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_gives_the_same_numbers(dtype: torch.dtype) -> None:
    # A view that was turned, as that of a latent's keys is.
    weight = drawn(1, HEADS, 20, 48, dtype=dtype).transpose(1, 2)
    x = part_of_wider(2, 5, 20, dtype)
    packed, batched = (torch.empty(5, HEADS, 48, dtype=dtype) for _ in range(2))
    PackedProducts(weight)(x, packed)
    BatchedProducts(weight)(x, batched)
    assert_close(packed, batched)


def test_no_rows_are_no_products() -> None:
    weight = drawn(1, HEADS, 8, 4, dtype=torch.float32)
    PackedProducts(weight)(torch.empty(0, HEADS, 4), torch.empty(0, HEADS, 8))


def test_which_products_a_layer_has() -> None:
    even, odd = (drawn(1, HEADS, 8, inputs, dtype=torch.bfloat16) for inputs in (6, 7))
    kernels = NativeKernels(torch.bfloat16)
    assert isinstance(head_products(even, kernels), PackedProducts)
    assert isinstance(head_products(odd, kernels), BatchedProducts)
    assert isinstance(head_products(odd.float(), NativeKernels(torch.float32)), PackedProducts)
    assert isinstance(head_products(even, LayerKernels()), BatchedProducts)
    assert head_products(even, LayerKernels()).copied_bytes == 0
    assert head_products(even, kernels).copied_bytes == HEADS * 32 * 6 * 2


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.empty(2, HEADS, 4), torch.empty(3, HEADS, 8)),
        (torch.empty(2, HEADS, 4), torch.empty(2, HEADS, 8, dtype=torch.bfloat16)),
        (torch.empty(2, HEADS, 4), torch.empty(2, HEADS, 40)),
        (torch.empty(2, 4, HEADS).transpose(1, 2), torch.empty(2, HEADS, 8)),
        (torch.empty(2, HEADS, 4), torch.empty(2, 1, 8).expand(2, HEADS, 8)),
    ],
)
def test_other_shapes_are_refused(x: Tensor, out: Tensor) -> None:
    with pytest.raises(RuntimeError):
        PackedProducts(drawn(1, HEADS, 8, 4, dtype=torch.float32))(x, out)


def test_a_matrix_has_its_products_once() -> None:
    """A model that WriteWeights makes anew keeps the matrices that it was not sent, and their copies."""
    copies, made = HeadCopies(), list[Tensor]()

    def products_of(matrix: Tensor) -> PackedProducts:
        def make() -> tuple[PackedProducts]:
            made.append(matrix.clone())
            return (PackedProducts(matrix.view(HEADS, 8, 4)),)

        (one,) = copies.of(matrix, make)
        assert isinstance(one, PackedProducts)
        return one

    first, other = (drawn(seed, HEADS * 8, 4, dtype=torch.float32) for seed in (1, 1))
    assert products_of(first) is products_of(first)
    # The same numbers are another matrix.
    assert products_of(other) is not products_of(first)
    assert len(made) == 2


@pytest.mark.parametrize("kernels", [NativeKernels(torch.float32), LayerKernels()])
def test_a_matrix_that_no_model_has_is_freed(kernels: LayerKernels) -> None:
    """Views of it, which torch's products are, do not keep it."""
    copies = HeadCopies()

    def used() -> weakref.ref[Tensor]:
        matrix = drawn(1, HEADS * 8, 4, dtype=torch.float32)
        copies.of(matrix, lambda: (head_products(matrix.view(HEADS, 8, 4), kernels),))
        return weakref.ref(matrix)

    freed = used()
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work_and_change_no_bits(threads: int) -> None:
    products, x = (
        PackedProducts(drawn(1, HEADS, 200, 64, dtype=torch.bfloat16)),
        part_of_wider(2, 9, 64, torch.bfloat16),
    )
    usual, found = (torch.empty(9, HEADS, 200, dtype=torch.bfloat16) for _ in range(2))
    products(x, usual)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products(x, found)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, usual)
