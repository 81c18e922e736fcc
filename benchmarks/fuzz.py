"""A bounded fuzz run of every parser: option words, manifests, JSON, ranges, curves, configs.

Each case is an undamaged example (`fuzz_targets.py`) with one to three things wrong with it
(`fuzz_damage.py`). Either it is read, and what was read round-trips, or it is refused by an
InputError of one line. A failure is any other exception, an error of several lines or of more than
2,000 characters, more than 2 s of a processor, 20 s on the clock, or more than 200 MB of memory.

The cases follow from `--seed` alone; `tests/reliability/test_fuzz.py` runs the first of them.

    python benchmarks/fuzz.py [--cases 20000] [--seed 0] [--targets recipe,stats.json]

A case that hangs is stopped by an alarm, which Windows has not; memory is looked at on Linux alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz_damage import damaged
from benchmarks.fuzz_targets import Target, targets
from quantkit.errors import InputError
from quantkit.results.environment import environment

OUT = Path(__file__).parent / "results" / "fuzz.json"
MOST_S = 2.0
STOPPED_S = 20
MOST_MIB = 200
MOST_CHARACTERS = 2000
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LISTED = 20


class Hang(BaseException):
    """A case that did not end by itself; no `except Exception` may take it for an error."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a target's cases.

    Attributes:
        failures: `what happened: the beginning of the input`, the first ones of each kind.
    """

    target: str
    stage: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)


@contextmanager
def _stopped_after(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def inputs(target: Target, cases: int, seed: int) -> Iterator[bytes]:
    """Yields the target's cases: its examples as they are, then damaged ones."""
    draw = random.Random(f"{seed} {target.name}")
    yield from target.seeds[:cases]
    for number in range(len(target.seeds), cases):
        yield damaged(target.damage, target.seeds[number % len(target.seeds)], draw)


def fed(target: Target, cases: int, seed: int, folder: Path) -> Outcome:
    """Returns what became of `cases` inputs of a target, in a folder that it may write to."""
    outcome = Outcome(target=target.name, stage=target.stage)
    for number, data in enumerate(inputs(target, cases, seed)):
        before = _memory_mib("VmRSS")
        started = time.process_time()
        wrong = ""
        try:
            with _stopped_after(STOPPED_S), warnings.catch_warnings():
                warnings.simplefilter("error")
                target.use(data, folder)
            outcome.accepted += 1
        except InputError as error:
            outcome.refused += 1
            wrong = "an example is refused" if number < len(target.seeds) else _worded(str(error))
        except Hang:
            wrong = "hangs"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong = f"{type(error).__name__}: {error!s:.100}"
        taken = time.process_time() - started
        grown = _memory_mib("VmHWM") - before
        if not wrong and taken > MOST_S:
            wrong = "takes more than 2 s"
        if not wrong and grown > MOST_MIB:
            wrong = "takes more than 200 MB"
        outcome.cases += 1
        outcome.seconds += taken
        outcome.slowest_s = max(outcome.slowest_s, taken)
        if wrong:
            outcome.failed += 1
            if len(outcome.failures) < LISTED:
                outcome.failures.setdefault(wrong, repr(data[:300]))
    return outcome


def _memory_mib(field: str) -> float:
    """Returns a field of this process's status; after `VmRSS` the peak, VmHWM, begins anew."""
    if not STATUS.exists():
        return 0.0
    found = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    if field == "VmRSS":
        CLEAR.write_text("5")
    return int(found.split()[1]) / 1024


def _worded(message: str) -> str:
    """Returns what is wrong with the words of an error, empty where nothing is."""
    if len(message.splitlines()) != 1:
        return "an error of several lines"
    if len(message) > MOST_CHARACTERS:
        return f"an error of {len(message):,} characters"
    return ""


def run(cases: int, seed: int, names: Sequence[str] = ()) -> list[Outcome]:
    """Returns the outcome of each target; `cases` are shared out evenly, fewer where one is slow.

    Raises:
        SystemExit: an unknown target.
    """
    chosen = [target for target in targets() if not names or target.name in names]
    unknown = set(names) - {target.name for target in chosen}
    if unknown:
        raise SystemExit(f"no target {', '.join(sorted(unknown))}")
    each = math.ceil(cases / sum(1.0 / target.cost for target in chosen))
    found = []
    with tempfile.TemporaryDirectory(prefix="quantkit-fuzz-") as name:
        for target in chosen:
            folder = Path(name) / target.name.replace("/", " ")
            folder.mkdir()
            found.append(fed(target, -(-each // target.cost), seed, folder))
            print(f"{target.name}: {found[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return found


def _print_table(found: Sequence[Outcome]) -> None:
    print(
        f"{'parser':<26} {'cases':>6} {'accepted':>9} {'refused':>8} {'failed':>7} {'slowest':>10}"
    )
    for one in found:
        print(
            f"{one.target:<26} {one.cases:>6} {one.accepted:>9} {one.refused:>8} "
            f"{one.failed:>7} {one.slowest_s:>10.3f}"
        )
        for wrong, data in one.failures.items():
            print(f"    {wrong}  <-  {data[:160]}")


def main() -> None:
    """Feeds all of them, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    names = [name for name in options.targets.split(",") if name]
    found = run(options.cases, options.seed, names)
    if not names:
        result = {
            "what": "damaged inputs of every parser: read and round-trips, or one line of error",
            "command": f"python benchmarks/fuzz.py --cases {options.cases} --seed {options.seed}",
            "environment": environment(),
            "seed": options.seed,
            "cases": sum(one.cases for one in found),
            "accepted": sum(one.accepted for one in found),
            "refused": sum(one.refused for one in found),
            "failed": sum(one.failed for one in found),
            "seconds": round(sum(one.seconds for one in found), 1),
            "targets": [
                vars(one) | {"seconds": round(one.seconds, 2), "slowest_s": round(one.slowest_s, 3)}
                for one in found
            ],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    _print_table(found)
    raise SystemExit(1 if any(one.failed for one in found) else 0)


if __name__ == "__main__":
    main()
