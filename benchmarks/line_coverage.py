"""Which lines and branches of numerics, probes and exporting their tests never run.

coverage.py (`pip install coverage`) watches the folders of tests in `TESTS`, branches too. Lines
that the compiler of numba turns into machine code cannot be seen; the tests that run them as plain
Python do not count here either, so `kernels.py` stands apart: see `benchmarks/mutation.py`.

Line numbers change with every edit, so the file keeps the text of a line that never ran; a reason
for it stands in `benchmarks/data/coverage_reasons.json`: a regular expression on
`module: line`, and why no test can or should run it. What has no reason is listed as `unexplained`.

    python benchmarks/line_coverage.py [--packages numerics,probes,exporting]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.results.environment import environment

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(__file__).parent / "results" / "line_coverage.json"
REASONS = Path(__file__).parent / "data" / "coverage_reasons.json"
PACKAGES = ("numerics", "probes", "exporting")
TESTS = (
    "tests/numerics", "tests/probes", "tests/exporting", "tests/quantization", "tests/calibration",
    "tests/outliers", "tests/reliability/test_masks.py", "tests/reliability/test_scales.py",
)  # fmt: skip
COMPILED = "numerics/kernels.py"


def watched(packages: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Returns coverage.py's report on the packages, and the last line that pytest printed."""
    with tempfile.TemporaryDirectory(prefix="quantkit-coverage-") as name:
        data, report = Path(name) / "data", Path(name) / "report.json"
        paths = ",".join(f"{ROOT}/quantkit/{package}" for package in packages)
        environ = os.environ | {"COVERAGE_FILE": str(data), "PYTHONPATH": str(ROOT)}
        coverage = [sys.executable, "-m", "coverage"]
        done = subprocess.run(
            [*coverage, "run", "--branch", f"--source={paths}", "-m", "pytest", "-q", *TESTS],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
        )
        said = (done.stdout.strip().splitlines() or [""])[-1]
        command = [*coverage, "json", "-q", "-o", str(report)]
        subprocess.run(command, cwd=ROOT, env=environ, check=True)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found, said


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one row a module: percent of lines, of branches, and what never ran."""
    reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else []
    found = []
    for path, one in sorted(report["files"].items()):
        module = Path(path).as_posix().rpartition("quantkit/")[2]
        lines = (ROOT / "quantkit" / module).read_text(encoding="utf-8").splitlines()
        summary = one["summary"]
        never = [
            {"line": lines[number - 1].strip(), "number": number} for number in one["missing_lines"]
        ]
        for row in never:
            row["why"] = _reason(f"{module}: {row['line']}", reasons)
        found.append(
            {
                "module": module,
                "statements": summary["num_statements"],
                "lines_pct": _percent(summary["covered_lines"], summary["num_statements"]),
                "branches": summary["num_branches"],
                "branches_pct": _percent(summary["covered_branches"], summary["num_branches"]),
                "never_run": never,
                "branches_never_taken": [list(pair) for pair in one["missing_branches"]],
            }
        )
    return found


def _reason(place: str, reasons: Sequence[dict[str, str]]) -> str:
    if place.startswith(COMPILED):
        return "compiled by numba, where coverage.py sees nothing"
    return next((rule["why"] for rule in reasons if re.search(rule["line"], place)), "")


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 100.0


def sums(found: Sequence[dict[str, Any]], packages: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row a package, the compiled module left out of it."""
    totals = []
    for package in packages:
        own = [
            row
            for row in found
            if row["module"].startswith(f"{package}/") and row["module"] != COMPILED
        ]
        ran = sum(row["statements"] - len(row["never_run"]) for row in own)
        taken = sum(round(row["branches"] * row["branches_pct"] / 100) for row in own)
        statements, branches = (sum(row[key] for row in own) for key in ("statements", "branches"))
        totals.append(
            {
                "package": package,
                "statements": statements,
                "lines_pct": _percent(ran, statements),
                "branches": branches,
                "branches_pct": _percent(taken, branches),
                "unexplained": sum(not line["why"] for row in own for line in row["never_run"]),
            }
        )
    return totals


def main() -> None:
    """Runs the tests, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    packages = options.packages.split(",")
    started = time.perf_counter()
    report, said = watched(packages)
    found = rows(report)
    result = {
        "what": "lines and branches of numerics, probes and exporting that their tests run",
        "command": "python benchmarks/line_coverage.py",
        "tool": f"coverage.py {report['meta']['version']}, with branches",
        "environment": environment(),
        "tests": list(TESTS),
        "pytest": said,
        "seconds": round(time.perf_counter() - started),
        "packages": sums(found, packages),
        "modules": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print(f"{'package':<12} {'lines %':>8} {'branches %':>11} {'unexplained':>12}   {said}")
    for row in result["packages"]:
        print(
            f"{row['package']:<12} {row['lines_pct']:>8.2f} {row['branches_pct']:>11.2f} "
            f"{row['unexplained']:>12}"
        )
    for row in found:
        for line in row["never_run"]:
            if not line["why"]:
                print(f"    {row['module']}:{line['number']}: {line['line']}")


if __name__ == "__main__":
    main()
