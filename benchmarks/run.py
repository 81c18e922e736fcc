"""Runs the benchmarks one after the other, then writes `reports/benchmarks`.

Each part is a process of its own and writes its file in `benchmarks/results`; a part that fails
does not stop the others. `benchmarks/results/run.json` says for each part when it ran, how long, at
what load of the machine, and how it ended. All take some hours on two cores; `--only` runs some.

    python benchmarks/run.py [--only recording,calibration]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.parts import PARTS, Part

ROOT = Path(__file__).parents[1]
LOG = Path(__file__).parent / "results" / "run.json"


def ran(part: Part) -> dict[str, Any]:
    """Runs one part from the repository's root; returns how it ended."""
    program, *rest = shlex.split(part.command)
    given = [sys.executable, *(["-m", "quantkit"] if program == "quantkit" else []), *rest]
    load, started = os.getloadavg()[0], time.perf_counter()
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    code = subprocess.run(given, cwd=ROOT, check=False).returncode
    return {
        "command": part.command,
        "begun": begun,
        "seconds": round(time.perf_counter() - started, 1),
        "load_before": round(load, 2),
        "code": code,
    }


def main() -> int:
    """Runs what is asked for, then the page; 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(part.name for part in PARTS))
    wanted = parser.parse_args().only.split(",")
    unknown = sorted(set(wanted) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are "
                     f"{', '.join(part.name for part in PARTS)}.")  # fmt: skip
    log: dict[str, Any] = json.loads(LOG.read_text()) if LOG.is_file() else {}
    for part in PARTS:
        if part.name in wanted:
            print(f"== {part.name}: {part.words}", flush=True)
            log[part.name] = ran(part)
            LOG.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    failed = [name for name in wanted if log[name]["code"]]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "page.py")], cwd=ROOT, check=True)
    print(f"{len(wanted)} parts, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
