"""Work side by side: each part once, errors are raised, torch's threads are as before."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from quantkit.numerics.threads import pool, side_by_side


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_part_runs_once_and_the_first_in_the_callers_thread(workers: int) -> None:
    before = torch.get_num_threads()
    ran: dict[int, tuple[str, int]] = {}
    side_by_side(
        lambda n: ran.update({n: (threading.current_thread().name, torch.get_num_threads())}),
        workers,
    )
    assert sorted(ran) == list(range(workers))
    assert ran[0][0] == threading.current_thread().name
    assert all(name.startswith("quantkit") for name, _ in (ran[n] for n in range(1, workers)))
    assert ran[0][1] == (before if workers == 1 else 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_of_any_part_is_raised_after_all_have_ended(wrong: int) -> None:
    before = torch.get_num_threads()
    ended: list[int] = []

    def work(n: int) -> None:
        if n == wrong:
            raise ValueError(f"part {n}")
        time.sleep(0.03)
        ended.append(n)

    with pytest.raises(ValueError, match=f"part {wrong}"):
        side_by_side(work, 3)
    assert sorted(ended) == [n for n in range(3) if n != wrong]
    assert torch.get_num_threads() == before


def test_threads_are_made_once() -> None:
    assert pool(3) is pool(3)
    assert pool(3)._max_workers == 2
    assert pool(1)._max_workers == 1
