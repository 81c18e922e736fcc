"""kill -9 at every stage of every long command: what it leaves is whole, and the next run ends it.

Each case is a run of a command that is killed, and what must hold then:

* whatever has its own name is whole: results by quantkit's readers, graphs by onnx's checker,
  weights, pages and charts by their own (`killing/check.py`); `quantkit.load` and `quantkit report`
  (every fourth time a page is drawn) take the folder, or refuse it in one line;
* the same command ends with exit code 0, without `--force`;
* what it then has written is what an uninterrupted run writes: bytes, and JSON field by field but
  for how long a training took;
* nothing of a temporary name stays: at once where it is an hour old when the command is given
  again (every second case), otherwise after the ten minutes for which it might be another
  process's.

Kinds of kill: at a write point (`killing/points.py`), `--points` of them, spread evenly, or at all
where there are fewer; at a random moment of the run, `--random` times; and for commands that go on
with what is there, `--twice` times at a point and then again while they go on. The models are
random, of two layers, so that what is killed takes seconds.

    python benchmarks/kills.py [--commands stats,train] [--points 25] [--random 25] [--seed 0]
    python benchmarks/kills.py --commands export --at "half of out/*export.json" --random 0

With `--at` it is quick: no page is drawn, and what a kill left is always old. Results of other
commands than those named stay in `--out`. Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# before torch is loaded: a pool of threads does not survive a fork
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

from killing.check import differences, half_written, litter, make_old
from killing.forks import Ended, command, import_all
from killing.inputs import COMMANDS, Command, make_inputs, with_out

OUT = Path(__file__).parent / "results" / "kills.json"
REPORT_EVERY = 4
"""Cases of which one has its page drawn; of the others it is read what a report reads."""
KINDS = ("write point", "random moment", "twice")


@dataclass(frozen=True)
class Kill:
    """One kill: at a point, counted from 1, or after some seconds; `then` is a second one's."""

    kind: str
    point: int = 0
    after_s: float = 0.0
    then: int = 0
    words: str = ""


@dataclass
class Bench:
    """One command, its uninterrupted run and its cases; `folder` holds all of it.

    Attributes:
        is_quick: No page is drawn, and what a kill leaves is made old at once.
    """

    one: Command
    folder: Path
    is_quick: bool = False
    whole: Ended = field(init=False)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    def run(self, **kill: Any) -> Ended:
        """Runs the command, perhaps to be killed."""
        return command(with_out(self.one, self.out), self.folder, **kill)

    def begin(self) -> None:
        """Runs it once to its end; what it leaves is what all cases have to come to."""
        self.whole = self.run()
        problems = half_written(self.out) + litter(self.out)
        if self.whole.code or problems:
            raise SystemExit(
                f"{self.one.name} fails without a kill: exit {self.whole.code}, {problems}\n"
                f"{self.whole.said[-2000:]}"
            )
        self.out.rename(self.reference)

    def case(self, kill: Kill, number: int) -> list[str]:
        """Returns what is wrong after a kill, in sentences; nothing where all is well."""
        is_old = number % 2 == 0 or self.is_quick
        shutil.rmtree(self.out, ignore_errors=True)
        ended = self.run(kill_at=kill.point) if kill.point else self.run(kill_after_s=kill.after_s)
        if kill.point and not ended.killed:
            return [f"the run did not come to its point: exit {ended.code}, {ended.said[-300:]}"]
        found = [f"half-written: {what}" for what in half_written(self.out)]
        if kill.then:
            self.run(kill_at=kill.then)
            found += [f"half-written, second kill: {what}" for what in half_written(self.out)]
        found += self._read_by_others(draws=number % REPORT_EVERY == 0 and not self.is_quick)
        if is_old:
            make_old(self.folder)
        found += self._again("again")
        left = litter(self.out)
        if left and is_old:
            found.append(f"stays behind: {', '.join(left)}")
        elif left:
            make_old(self.folder)
            found += self._again("once more")
            found += [f"stays behind after an hour: {what}" for what in litter(self.out)]
        return found

    def _again(self, which: str) -> list[str]:
        again = self.run()
        if again.code:
            return [f"{which}: exit {again.code}: {again.said.strip()[-300:]}"]
        return [f"{which}: {what}" for what in differences(self.out, self.reference)]

    def _read_by_others(self, *, draws: bool) -> list[str]:
        """Returns what goes wrong where other commands are given the folder as it is."""
        from quantkit import load
        from quantkit.errors import InputError
        from quantkit.reporting.collect import collect

        found = []
        for read in (load, lambda folder: collect([folder])):
            try:
                read(self.out)
            except InputError:
                pass
            except Exception as error:
                found.append(f"a reader: {type(error).__name__}: {error}")
        if not draws or self.one.name == "report" or not self.out.is_dir():
            return found
        aside = self.folder / "page"
        ended = command(("report", str(self.out), "--out", str(aside)), self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        lines = ended.said.strip().splitlines()
        if ended.code not in (0, 2) or (ended.code == 2 and len(lines) != 1):
            found.append(f"report: exit {ended.code}, {len(lines)} lines: {ended.said[-300:]}")
        return found


def drawn(bench: Bench, given: argparse.Namespace, rng: random.Random) -> Iterator[Kill]:
    """Yields the kills of one command."""
    points, seconds = bench.whole.points, bench.whole.seconds
    if given.at:
        for pattern in given.at.split(","):
            places = [n for n, what in enumerate(points, 1) if fnmatch(what, pattern)]
            if places:
                yield Kill("write point", point=places[0], words=points[places[0] - 1])
    else:
        count = min(given.points, len(points))
        for index in range(count):
            point = 1 + round(index * (len(points) - 1) / max(1, count - 1))
            yield Kill("write point", point=point, words=points[point - 1])
    for _ in range(given.random):
        after_s = rng.uniform(0.0, seconds)
        yield Kill("random moment", after_s=after_s, words=f"after {after_s:.2f} s")
    for _ in range(given.twice if bench.one.resumes else 0):
        point, then = rng.randint(1, len(points)), rng.randint(1, max(1, len(points) // 2))
        words = f"{points[point - 1]}, then point {then} of the next run"
        yield Kill("twice", point=point, then=then, words=words)


def run_one(one: Command, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one command."""
    folder.mkdir()
    begun = time.perf_counter()
    bench = Bench(one, folder, is_quick=bool(given.at))
    bench.begin()
    print(f"{one.name}: {len(bench.whole.points)} write points, {bench.whole.seconds:.1f} s")
    counts = dict.fromkeys(KINDS, 0)
    failures = []
    for number, kill in enumerate(drawn(bench, given, random.Random(f"{given.seed} {one.name}"))):
        found = bench.case(kill, number)
        counts[kill.kind] += 1
        print(f"  {kill.kind}: {kill.words}: {'; '.join(found) or 'ok'}", flush=True)
        if found:
            failures.append({"kind": kill.kind, "at": kill.words, "found": found})
    return {
        "write_points": len(bench.whole.points),
        "run_s": round(bench.whole.seconds, 2),
        "cases": counts,
        "failures": failures,
        "seconds": round(time.perf_counter() - begun, 1),
        "seed": given.seed,
    }


def main() -> int:
    """Kills what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--points", type=int, default=25)
    parser.add_argument("--random", type=int, default=25)
    parser.add_argument("--twice", type=int, default=5)
    parser.add_argument("--at", default="", help="patterns of points, the first of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    names = given.commands.split(",")
    unknown = set(names) - set(COMMANDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(COMMANDS)}")
    import_all()
    from quantkit.results.environment import environment

    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch).resolve()
        os.environ["QUANTKIT_CACHE"] = str(root / "cache")
        commands = make_inputs(root / "inputs", names)
        for name in names:
            row = run_one(commands[name], root / name, given)
            failed |= bool(row["failures"])
            known = json.loads(given.out.read_text()) if given.out.is_file() else {}
            rows = known.get("commands", {}) | {name: row}
            plain = {
                "environment": environment(),
                "commands": {key: rows[key] for key in COMMANDS if key in rows},
            }
            given.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {sum(row['cases'].values())} kills, {len(row['failures'])} failed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
