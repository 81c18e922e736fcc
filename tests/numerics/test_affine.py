"""The integer grid: a table by hand, a numpy oracle, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.affine import (
    QParams,
    RangeError,
    affine_params,
    check_range,
    dequantize,
    expand_groups,
    fake_quantize,
    quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import (
    PerAxis,
    PerGroup,
    PerHead,
    PerRow,
    PerSequence,
    PerTensor,
)
from quantkit.numerics.qtypes import QType

INF, NAN = float("inf"), float("nan")
TYPES = [
    QType.parse(n)
    for n in [
        "int2",
        "int2n",
        "int3n",
        "int4",
        "int4n",
        "uint4",
        "int6n",
        "int8",
        "int8n",
        "uint8",
        "int16",
        "uint16",
    ]
]
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


def oracle(x: Tensor, scale: Tensor, zero_point: int, qtype: QType) -> list[int]:
    """The same grid from numpy in float64, apart from the one float32 division."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = (x.numpy() / scale.numpy()).astype(np.float32).astype(np.float64)
    q = np.clip(np.rint(ratio) + zero_point, qtype.qmin, qtype.qmax)
    result: list[int] = q.astype(np.int64).flatten().tolist()
    return result


@pytest.mark.parametrize(
    ("x", "q"),
    [
        (0.5, 0),  # ties go to the even neighbour
        (1.5, 2),
        (2.5, 2),
        (-0.5, 0),
        (-1.5, -2),
        (-2.5, -2),
        (-0.0, 0),
        (1e-45, 0),
        (7.4999, 7),
        (127.5, 127),
        (-128.5, -128),
        (INF, 127),
        (-INF, -128),
        (3e38, 127),  # beyond any integer type: no wrapping
        (-3e38, -128),
        (3e9, 127),
        (NAN, -128),
    ],
)
def test_int8_with_scale_1_by_hand(x: float, q: int) -> None:
    got = quantize(torch.tensor([x]), torch.tensor(1.0), 0, QType(bits=8))
    assert got.dtype == torch.int32
    assert got.tolist() == [q]


def test_the_division_is_no_product_with_the_reciprocal() -> None:
    x = torch.arange(1, 4001, dtype=torch.float32) * 0.005
    scale = torch.tensor(0.01)
    quotient, product = (x / scale).round(), (x * (1 / scale)).round()
    apart = quotient != product
    assert bool(apart.any()), "the case no longer tells the two apart"
    got = quantize(x, scale, 0, QType(bits=16))
    assert torch.equal(got[apart], quotient[apart].to(torch.int32))


@settings(deadline=None)
@given(
    st.lists(floats32, min_size=1, max_size=40),
    st.sampled_from(TYPES),
    st.floats(2**-60, 2**60, width=32),
    st.floats(0, 1),
)
def test_the_grid_is_numpys(values: list[float], qtype: QType, scale: float, at: float) -> None:
    x, s = torch.tensor(values, dtype=torch.float32), torch.tensor(scale, dtype=torch.float32)
    zp = round(qtype.qmin + at * (qtype.qmax - qtype.qmin))
    q = quantize(x, s, zp, qtype)
    assert q.tolist() == oracle(x, s, zp, qtype)
    assert torch.equal(q, quantize(x, s, torch.tensor(zp, dtype=torch.int32), qtype))


@settings(deadline=None)
@given(
    st.lists(floats32, min_size=1, max_size=40),
    st.sampled_from(TYPES),
    st.booleans(),
)
def test_laws_of_a_grid_made_from_its_own_range(
    values: list[float], qtype: QType, symmetric: bool
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    zp: Tensor | int
    # qmax times the rounded scale of float32's largest number is inf, as it is in ONNX
    assume(float(x.abs().max()) < 3.4e38)
    if symmetric:
        scale, zp = symmetric_scale(x.abs().amax(), qtype), 0
        if not qtype.signed:
            x = x.abs()
    else:
        scale, zp = affine_params(x.amin(), x.amax(), qtype)
    before = x.clone()
    y = fake_quantize(x, scale, zp, qtype)
    assert torch.equal(x, before), "the argument changed"
    assert bits(y) == bits(dequantize(quantize(x, scale, zp, qtype), scale, zp))
    # Idempotent, monotone, zero exact.
    assert bits(fake_quantize(y, scale, zp, qtype)) == bits(y)
    order = x.argsort()
    assert bool((y[order].diff() >= 0).all())
    assert bits(fake_quantize(torch.tensor([0.0, -0.0]), scale, zp, qtype)) == [0, 0]
    # Half a step at the most; with a zero point that was rounded, one end may lie half a step
    # outside, and then it is a whole step less a rounding.
    step = scale.double()
    allowed = step / 2 if symmetric else step
    if symmetric or float(x.abs().max()) < 1e37:
        low = -x.abs().amax().double() / qtype.qmax * -qtype.qmin if symmetric else -INF
        inside = x.double() >= low if qtype.signed else x >= 0
        error = (y.double() - x.double()).abs()
        slack = x.double().abs() * 2**-22 + step * qtype.levels * 2**-22
        assert bool((error <= allowed + slack)[inside].all())


def test_fake_quantize_keeps_dtype_and_nan() -> None:
    x = torch.tensor([1.0, NAN, -3.0], dtype=torch.bfloat16)
    y = fake_quantize(x, torch.tensor(0.5), 0, QType(bits=4))
    assert y.dtype == torch.bfloat16
    assert y[0] == 1.0 and y[1].isnan() and y[2] == -3.0


@pytest.mark.kind(2, "numerics")
def test_symmetric_scale_by_hand() -> None:
    q = QType(bits=4, narrow=True)
    got = symmetric_scale(torch.tensor([7.0, 0.0, 1e-45, 3.4e38]), q)
    assert got.tolist()[:2] == [1.0, 1.0]
    assert got[2] == torch.finfo(torch.float32).tiny
    assert got.isfinite().all()
    assert got.dtype == torch.float32


@pytest.mark.kind(2, "numerics")
def test_affine_params_by_hand() -> None:
    q8, u8 = QType(bits=8), QType(bits=8, signed=False)
    lo, hi = torch.tensor([-1.0, 0.5, -2.0, 0.0]), torch.tensor([1.55, 2.55, -1.0, 0.0])
    scale, zp = affine_params(lo, hi, u8)
    assert torch.allclose(scale, torch.tensor([0.01, 0.01, 2 / 255, 1.0]))
    assert zp.tolist() == [100, 0, 255, 0]  # 0.5..2.55 was widened to 0..2.55
    assert affine_params(lo, hi, q8)[1].tolist() == [-28, -128, 127, 0]
    wide = torch.tensor(3.4e38)
    scale, zp = affine_params(-wide, wide, q8)
    assert scale.isfinite() and zp in (-1, 0)
    scale, _ = affine_params(torch.tensor(0.0), torch.tensor(1e-45), q8)
    assert scale > 0


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_range_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    with pytest.raises(RangeError, match=r"layers\.3\.mlp"):
        check_range(torch.tensor([0.0, bad]), torch.tensor([1.0, 1.0]), "layers.3.mlp")
    with pytest.raises(RangeError, match=r"layers\.3\.mlp"):
        check_range(0.0, bad, "layers.3.mlp")
    with pytest.raises(RangeError, match="reverse"):
        check_range(1.0, 0.0, "x")
    check_range(-1.0, 1.0, "x")


@pytest.mark.kind(2, "numerics")
def test_qparams_checks_what_it_promises() -> None:
    one, zero, q = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), QType(bits=4)
    QParams(scale=one, zero_point=zero, qtype=q)
    for scale in (0.0, -1.0, INF, NAN):
        with pytest.raises(RangeError, match="positive and finite"):
            QParams(scale=torch.tensor(scale), zero_point=zero, qtype=q)
    with pytest.raises(RangeError, match=r"\[-8, 7\]"):
        QParams(scale=one, zero_point=zero + 8, qtype=q)
    with pytest.raises(RangeError, match="int32"):
        QParams(scale=one, zero_point=zero.long(), qtype=q)
    with pytest.raises(RangeError, match="broadcast"):
        QParams(scale=one.expand(3), zero_point=zero.expand(2), qtype=q)


def test_reduce_absmax_over_logits() -> None:
    x = torch.randn(2, 3, 4, 5)
    want = x.abs().numpy()
    for granularity, axes in [
        (PerTensor(), (0, 1, 2, 3)),
        (PerSequence(), (1, 2, 3)),
        (PerHead(), (2, 3)),
        (PerRow(), (3,)),
        (PerAxis(axis=1), (0, 2, 3)),
        (PerAxis(axis=-1), (0, 1, 2)),
    ]:
        got = reduce_absmax(x, granularity)
        assert np.array_equal(got.numpy(), want.max(axis=axes, keepdims=True)), granularity


@pytest.mark.kind(1, "numerics")
def test_reduce_absmax_leaves_out_what_is_not_valid() -> None:
    x = torch.tensor([[[[1.0, 9.0], [NAN, INF]]]])
    valid = torch.tensor([[True, False], [False, False]])
    assert reduce_absmax(x, PerRow(), valid).flatten().tolist() == [1.0, 0.0]
    assert reduce_absmax(x, PerRow()).isnan().any()
    assert reduce_absmax(torch.zeros(1, 2, 3, 0), PerRow()).shape == (1, 2, 3, 1)
    assert x[0, 0, 1].isnan().any(), "the argument changed"


@pytest.mark.kind(5, "numerics")
def test_reduce_absmax_over_groups_with_a_short_last_one() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0, -5.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    g = PerGroup(axis=1, group_size=2)
    got = reduce_absmax(x, g)
    assert got.tolist() == [[2.0, 4.0, 5.0], [0.0, 0.0, 1.0]]
    assert expand_groups(got, g, x.shape).tolist() == [[2, 2, 4, 4, 5], [0, 0, 0, 0, 1]]
    assert reduce_absmax(x, PerGroup(axis=0, group_size=2)).tolist() == [[1, 2, 3, 4, 5]]


def test_a_granularity_that_does_not_fit_is_an_input_error() -> None:
    with pytest.raises(InputError, match="rank 2"):
        reduce_absmax(torch.zeros(2, 2), PerHead())
    with pytest.raises(InputError, match="axis=2"):
        reduce_absmax(torch.zeros(2, 2), PerAxis(axis=2))
    with pytest.raises(InputError, match="axis=2"):
        reduce_absmax(torch.zeros(2, 2), PerGroup(axis=2, group_size=2))


def test_a_row_scale_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(2, 3, 4, 5)
    q = QType(bits=4, narrow=True)
    whole = fake_quantize(x, symmetric_scale(reduce_absmax(x, PerRow()), q), 0, q)
    one = x[1:, 2:, 3:]
    alone = fake_quantize(one, symmetric_scale(reduce_absmax(one, PerRow()), q), 0, q)
    assert torch.equal(whole[1:, 2:, 3:], alone)


LAST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("zero_point", [0, 3, torch.tensor([[-8], [7]], dtype=torch.int32)])
def test_out_takes_the_result_and_may_be_the_argument(zero_point: Tensor | int) -> None:
    q = QType(bits=4)
    x = torch.tensor([[-1e9, -3.3, -0.2, 0.4, 2.6, 1e9]]).repeat(2, 1)
    scale = torch.tensor([[0.5], [0.25]])
    want = fake_quantize(x, scale, zero_point, q)
    out = torch.full_like(x, NAN)
    got = fake_quantize(x, scale, zero_point, q, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert bits(got) == bits(want)
    assert bits(fake_quantize(x, scale, zero_point, q, out=x)) == bits(want)
    assert bits(x) == bits(want)


def test_the_grid_is_float32s_whatever_the_type() -> None:
    q, one = QType(bits=8), torch.tensor(1.0)
    just_above = torch.tensor([0.5 + 1e-12], dtype=torch.float64)  # 0.5 in float32, a tie
    just_below = torch.tensor([1.0 - 1e-12], dtype=torch.float64)  # 1 in float32
    assert quantize(just_above, one, 0, q).tolist() == [0]
    assert quantize(torch.tensor([0.5]), just_below, 0, q).tolist() == [0]
    assert fake_quantize(torch.tensor([0.5]), just_below, 0, q).tolist() == [0.0]
    third = torch.tensor([1 / 3], dtype=torch.float64)
    values = dequantize(torch.tensor([127], dtype=torch.int8), third, -128)
    assert values.dtype == torch.float32
    assert values.tolist() == [float(np.float32(255) * np.float32(1 / 3))]
    out = fake_quantize(torch.tensor([1.0]), third, 0, q, out=torch.empty(1))
    assert out.tolist() == [float(np.float32(3) * np.float32(1 / 3))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_are_computed_in_float32_whatever_the_type(dtype: torch.dtype) -> None:
    q = QType(bits=8, narrow=True)
    lo, hi = torch.tensor([-0.3, -1.0]).to(dtype), torch.tensor([1.7, 0.1]).to(dtype)
    for low, high in ((lo, hi), (lo.float(), hi), (lo, hi.float())):
        scale, zero_point = affine_params(low, high, q)
        want = affine_params(lo.float(), hi.float(), q)
        assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
        assert bits(scale) == bits(want[0])
        assert torch.equal(zero_point, want[1])
    got = symmetric_scale(hi, q)
    assert got.dtype == torch.float32
    assert bits(got) == bits(symmetric_scale(hi.float(), q))
    for granularity in (PerTensor(), PerAxis(axis=0), PerGroup(axis=0, group_size=2)):
        assert reduce_absmax(lo, granularity).dtype == torch.float32
    assert reduce_absmax(lo[:0], PerTensor()).dtype == torch.float32


@pytest.mark.parametrize("qtype", TYPES, ids=str)
def test_a_range_as_wide_as_float32_comes_back_finite(qtype: QType) -> None:
    x = torch.tensor([-LAST, LAST])
    scale, zero_point = affine_params(x[0], x[1], qtype)
    assert fake_quantize(x, scale, zero_point, qtype).isfinite().all()
    assert float(scale) * (qtype.levels - 1) == pytest.approx(2 * LAST, rel=0.51)
    ends = symmetric_scale(torch.tensor([LAST, 1.0]), qtype)
    outermost = ends * float(qtype.qmax)
    assert outermost.isfinite().all()
    assert outermost[0] >= LAST * (1 - 2e-7)
    assert bits(ends[1:]) == bits(torch.tensor([1.0]) / float(qtype.qmax))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_to_a_finite_number_at_both_ends(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, largest], dtype=dtype)
    q = QType(bits=2)
    scale = torch.tensor(largest * 0.9)
    end = float(torch.tensor(largest * 0.9).to(dtype))
    assert fake_quantize(x, scale, 0, q).tolist() == [-end, end]
    wide = torch.tensor(largest * 0.75)
    got = fake_quantize(x, wide, torch.tensor(1, dtype=torch.int32), QType(bits=3))
    assert got.isfinite().all()
    got = fake_quantize(x * 0.9, wide, torch.tensor(-1, dtype=torch.int32), QType(bits=3))
    assert got.isfinite().all()


def test_a_range_names_the_bound_and_what_is_in_it() -> None:
    for lo, hi, said in (
        (NAN, 1.0, "got NaN in 1 of 1 lower"),
        (-INF, 1.0, "got inf in 1 of 1 lower"),
        (0.0, INF, "got inf in 1 of 1 upper"),
        (torch.zeros(3), torch.tensor([1.0, NAN, INF]), "got NaN in 2 of 3 upper"),
        # beyond float32
        (torch.zeros(1), torch.tensor([1e39], dtype=torch.float64), "got inf in 1 of 1 upper"),
        (torch.tensor([-1e39], dtype=torch.float64), torch.ones(1), "got inf in 1 of 1 lower"),
        (torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), "reverse in 2 places"),
    ):
        with pytest.raises(RangeError, match=said):
            check_range(lo, hi, "t")
    check_range(1.0, 1.0, "a constant")


def test_a_zero_point_may_be_either_end_of_the_type() -> None:
    q = QType(bits=4)
    for end in (q.qmin, q.qmax):
        zero_point = torch.tensor(end, dtype=torch.int32)
        assert QParams(scale=torch.tensor(1.0), zero_point=zero_point, qtype=q).zero_point == end
    for beyond in (q.qmin - 1, q.qmax + 1):
        with pytest.raises(RangeError, match="must lie in"):
            QParams(scale=torch.tensor(1.0), zero_point=zero_point * 0 + beyond, qtype=q)


@pytest.mark.parametrize("axis", range(-4, 4))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_groups_along_any_axis(axis: int, size: int) -> None:
    x = torch.randn(2, 3, 4, 5)
    wide = np.moveaxis(x.abs().numpy(), axis, -1)
    parts = [wide[..., i : i + size].max(-1) for i in range(0, wide.shape[-1], size)]
    want = np.moveaxis(np.stack(parts, -1), -1, axis)
    assert np.array_equal(reduce_absmax(x, PerGroup(axis=axis, group_size=size)).numpy(), want)
    kept = tuple(a for a in range(4) if a != axis % 4)
    alone = reduce_absmax(x, PerAxis(axis=axis)).numpy()
    assert np.array_equal(alone, x.abs().numpy().max(kept, keepdims=True))


@pytest.mark.parametrize("axis", [-3, 2])
def test_an_axis_just_outside_is_refused(axis: int) -> None:
    for granularity in (PerAxis(axis=axis), PerGroup(axis=axis, group_size=2)):
        with pytest.raises(InputError, match=f"axis={axis}"):
            reduce_absmax(torch.zeros(2, 2), granularity)
