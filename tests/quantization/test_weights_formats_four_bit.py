"""NF4 and FP4 against their definitions and `Linear4bit`; what needs bitsandbytes."""

from __future__ import annotations

import subprocess
import sys
from statistics import NormalDist
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.quantization.bitsandbytes_formats import four_bit
from quantkit.recipe import BitsAndBytes
from tests.quantization.weights_inside import inside

F32 = np.float32


def codes(name: str) -> NDArray[Any]:
    """NF4: quantiles of a Gaussian (QLoRA, equation 4); FP4: three bits of sign-free floats."""
    if name == "fp4":
        half = np.array([0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
        return np.unique(np.concatenate([-half, half])).astype(F32)
    end, quantile = 0.9677083, np.vectorize(NormalDist().inv_cdf)
    up, down = quantile(np.linspace(end, 0.5, 9)[:-1]), quantile(np.linspace(end, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([up, [0], -down]))
    return (values / values.max()).astype(F32)


@pytest.mark.parametrize("block", [64, 128, 4096])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(48, 128), (10, 70), (7, 9)], ids=str)
def test_four_bits_equal_loops_in_numpy(shape: tuple[int, int], name: str, block: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    weight[:2] = 0.0
    found = four_bit(weight, BitsAndBytes(format=name, block=block)).numpy().reshape(-1)  # type: ignore[arg-type]
    flat, table = weight.numpy().reshape(-1), codes(name)
    for start in range(0, flat.size, block):
        own = flat[start : start + block]
        top = np.abs(own).max()
        for x, y in zip(own, found[start : start + block], strict=True):
            distance = np.abs(table * top - x)
            # the one that it took is a nearest one, to the rounding of a code's last printed digit
            taken = np.abs(table * top - y).argmin()
            assert abs(table[taken] * top - y) <= 1e-4 * top
            assert distance[taken] <= distance.min() + 1e-4 * top


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_four_bits_compute_as_linear4bit(bias: bool, name: str) -> None:
    torch.manual_seed(5)
    linear = nn.Linear(128, 64, bias=bias)
    layer: Any = bnb.nn.Linear4bit(
        128,
        64,
        bias=bias,
        compute_dtype=torch.float32,
        compress_statistics=False,
        quant_type=name,
    )
    layer.load_state_dict(linear.state_dict())
    layer.to("cpu").eval()
    packs = layer.support_avx512bf16_for_cpu  # a path of its own, in bfloat16
    layer.support_avx512bf16_for_cpu = False
    x = torch.randn(3, 6, 128)
    model = nn.Sequential(linear)
    with torch.inference_mode():
        with inside(model, name):
            found = model(x)
        assert torch.equal(found, layer(x))
        layer.support_avx512bf16_for_cpu = packs
        exact = layer(x)
    assert (found - exact).norm() / exact.norm() < 0.01
    assert (found - linear(x)).norm() / exact.norm() > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_four_bits_keep_the_type(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = four_bit(weight, BitsAndBytes(format="nf4"))
    assert found.dtype == dtype
    expected = four_bit(weight.float(), BitsAndBytes(format="nf4"))
    assert torch.allclose(found.float(), expected, rtol=1e-2)


def parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, int, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: (p, p.data_ptr(), p.detach().clone()) for name, p in named}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    for name, (parameter, place, values) in before.items():
        assert after[name] is parameter, name
        assert parameter.data_ptr() == place, name
        assert torch.equal(parameter, values), name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("recipe", ["nf4", "fp4", "llm-int8"])
def test_without_bitsandbytes_it_says_what_to_install(
    recipe: str, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    before = parameters(tiny_llama)
    with (
        pytest.raises(InputError, match=r"bitsandbytes, which is missing: .*quantkit\[bnb\]"),
        inside(tiny_llama, recipe),
    ):
        raise AssertionError("not reached")
    assert_untouched(tiny_llama, before)
    with inside(tiny_llama, "w4:group8"):
        pass  # nothing else needs it


def test_bitsandbytes_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, quantkit.quantization.weights, quantkit.recipe;"
        "sys.exit('bitsandbytes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
