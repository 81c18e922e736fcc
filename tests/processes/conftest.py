"""Ctrl-C reaches these tests, and what they start, also in a worker of pytest-xdist."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def python_own_interrupt() -> Iterator[None]:
    """Workers ignore SIGINT, which their children would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
