"""Linear layers compute the product of their weight in every layout, and int8 within the rounding of its steps."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from rlharvest_rollout.engines.torch.linear import INT8_MOST, linear, quantise, row_blocks
from rlharvest_rollout.engines.torch.numerics import ROW_BLOCK, Numerics
from torch.nn import functional

OUTPUTS, INPUTS = 192, 128


def numerics(dtype: Literal["float32", "bfloat16"] = "float32") -> Numerics:
    return Numerics(dtype=dtype, invariant=True, threads=1)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_layer_is_the_plain_product(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(OUTPUTS, INPUTS), torch.randn(rows, INPUTS)
    bias = torch.randn(OUTPUTS) if with_bias else None
    with torch.inference_mode():
        found = linear(weight, bias, numerics())(x)
    assert torch.allclose(found, functional.linear(x, weight, bias), atol=1e-4)


def test_quantised_weights_are_off_by_at_most_half_a_step_and_zeros_stay() -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS)
    weight[3] = 0
    held, scale = quantise(weight)
    assert held.dtype == torch.int8
    assert int(held.abs().max()) == INT8_MOST
    assert bool(((held * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all())
    assert not bool(held[3].any())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_layer_is_the_product_of_its_rounded_weight(dtype: Literal["float32", "bfloat16"]) -> None:
    torch.manual_seed(0)
    chosen = numerics(dtype)
    weight, bias, x = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS), torch.randn(5, INPUTS)
    held, scale = quantise(weight)
    with torch.inference_mode():
        found = linear(weight, bias, chosen, int8=True)(x.to(chosen.compute_dtype)).float()
    wanted = functional.linear(x, held * scale[:, None], bias)
    tolerance = 1e-4 if dtype == "float32" else 0.02 * float(wanted.abs().max())
    assert torch.allclose(found, wanted, atol=tolerance)


@pytest.mark.parametrize("int8", [False, True])
def test_blocks_that_the_probe_allows_give_the_bits_of_16(int8: bool) -> None:
    chosen = numerics("bfloat16")
    blocks = row_blocks({(OUTPUTS, INPUTS, int8)}, chosen)
    torch.manual_seed(1)
    layer = linear(torch.randn(OUTPUTS, INPUTS), None, chosen, int8=int8)
    x = torch.randn(48, INPUTS).to(chosen.compute_dtype)
    with torch.inference_mode():
        wanted = torch.cat([layer(block) for block in x.split(ROW_BLOCK)])
        for size in blocks:
            n = len(x) // size * size
            assert torch.equal(
                torch.cat([layer(block) for block in x[:n].split(size)]) if n else wanted[:0], wanted[:n]
            )
