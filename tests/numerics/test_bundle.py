"""A bundle: each of its parts as if it alone had been used."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics.observers import Bundle, Histogram, MinMax, Moments, TopK, merged

X = torch.tensor([[1.0, -2.0, 300.0, 0.0], [0.5, 0.25, -8.0, 4.0], [-0.0, 9.0, 1e-3, -7.0]])
TAGS = torch.tensor([4, 3, 9, 1])


def parts(bundle: Bundle) -> dict[str, dict[str, torch.Tensor]]:
    return bundle.state()


def same(a: Bundle, b: Bundle) -> None:
    assert parts(a).keys() == parts(b).keys() == {"minmax", "topk", "moments", "histogram"}
    for name, state in parts(a).items():
        assert state.keys() == parts(b)[name].keys()
        for field, x in state.items():
            torch.testing.assert_close(x, parts(b)[name][field], rtol=1e-12, atol=1e-12, msg=field)


def by_hand(
    x: torch.Tensor, valid: torch.Tensor | None = None, sampled: torch.Tensor | None = None
) -> Bundle:
    groups = x.shape[0]
    return Bundle(
        minmax=MinMax.empty(groups).update(x, valid=valid),
        topk=TopK.empty(groups, k=3).update(x, TAGS.expand(x.shape), valid=valid),
        moments=Moments.empty(groups).update(x, valid=sampled),
        histogram=Histogram.empty(groups).update(x, valid=sampled),
    )


def seen(x: torch.Tensor, **options: torch.Tensor) -> Bundle:
    return Bundle.empty(x.shape[0], k=3).update(x, TAGS, **options)


def test_a_bundle_is_its_parts() -> None:
    valid = torch.tensor([[True, False, True, True]])
    sampled = torch.tensor([[True, False, False, True]])
    same(seen(X), by_hand(X))
    same(seen(X, valid=valid), by_hand(X, valid, valid))
    same(seen(X, valid=valid, sampled=sampled), by_hand(X, valid, sampled))
    same(seen(X, sampled=sampled), by_hand(X, None, sampled))
    empty = Bundle.empty(3, k=3)
    assert empty.update(X[:, :0], TAGS[:0]) is empty


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 3), (0, 3), (2, 3)])
def test_some_of_its_groups(start: int, stop: int) -> None:
    same(seen(X).select(start, stop), seen(X[start:stop]))


def test_one_group_of_all() -> None:
    pooled = seen(X).pool()
    tags = TAGS.repeat(3)
    flat = X.reshape(1, -1)
    assert pooled.minmax.finish()[0].item() == -8.0
    assert pooled.topk.values.tolist() == [[300.0, 9.0, 8.0]]
    assert pooled.topk.tags.tolist() == [[9, 3, 9]]
    same(pooled, Bundle.empty(1, k=3).update(flat, tags))


def test_saved_moved_and_merged() -> None:
    bundle = seen(X)
    same(Bundle.from_state(bundle.state()), bundle)
    same(bundle.to("cpu"), bundle)
    whole = merged([seen(X[:, :2].repeat(1, 2)), bundle, seen(-X)])
    same(whole, seen(X[:, :2].repeat(1, 2)).merge(bundle).merge(seen(-X)))
    assert whole.minmax.count.tolist() == [12, 12, 12]
    meta = bundle.to("meta").minmax.state()
    assert {x.device.type for x in meta.values()} == {"meta"}


def test_the_floor_is_the_least_that_is_kept() -> None:
    assert seen(X).floor.tolist() == [1.0, 0.5, pytest.approx(1e-3)]
    assert Bundle.empty(2, k=3).floor.tolist() == [-1.0, -1.0]
