"""Work that is cut into parts by itself, a thread a part, each with one thread of torch's own.

Many small operations on what stays in a core's cache are faster so than shared out one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def side_by_side(work: Callable[[int], None], workers: int) -> None:
    """Runs `work(worker)` for every worker, the first in the caller's thread.

    Grad and inference mode are a thread's own: the others have torch's defaults.
    """
    if workers == 1:
        work(0)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        others = [pool(workers).submit(work, n) for n in range(1, workers)]
        try:
            work(0)
        finally:
            wait(others)  # nobody writes any more to what the parts share
        for other in others:
            other.result()
    finally:
        torch.set_num_threads(threads)


@cache
def pool(workers: int) -> ThreadPoolExecutor:
    """Returns threads for all workers but the caller's; made once."""
    return ThreadPoolExecutor(max_workers=max(1, workers - 1), thread_name_prefix="quantkit")
