"""Mutation of `quantkit/numerics`: which planted faults do its tests not notice.

mutmut (`pip install mutmut==3.8.1`) changes one thing at a time, a comparison, a constant, an
argument, and runs the tests that reach the changed function until one fails. It works on a copy in
a temporary folder; the repository is not touched. Of a module with more than `--most` mutants a
seeded sample is taken, and the table says so. A module is tested by the files of `TESTED_BY` alone,
which makes the score a lower bound.

* The compiled loops of `kernels.py` are mutated as plain Python: their decorators are left out of
  the copy, and only the tests named in `KERNEL_TESTS` run, which are short without a compiler.
* Property tests run without shrinking, from a fixed seed.
* A survivor inside a `raise` or in what makes up a message is `error text`; every other one needs
  a line in `benchmarks/mutation_reasons.json` (`where` and `change` are regular expressions),
  or is listed as `unexplained`.

    python benchmarks/mutation.py [--modules affine,observers/topk] [--most 250] [--seed 0]

Results of modules that are not asked for stay in the file. `--explain` classes the survivors of
the file anew without running anything.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.results.environment import environment

ROOT = Path(__file__).resolve().parents[1]
NUMERICS = ROOT / "quantkit" / "numerics"
OUT = Path(__file__).parent / "results" / "mutation.json"
REASONS = Path(__file__).parent / "mutation_reasons.json"
OBSERVERS = ("observers",)
TESTED_BY = {
    "affine": ("affine", "affine_onnx"),
    "scan": ("scan",),
    "observers/histogram": OBSERVERS,
    "choose": ("choose", "divergence"),
    "distortion": ("distortion", "divergence", "choose"),
    "granularity": ("affine", "qtypes"),
    "outliers": ("outliers",),
    "observers/moving": ("moving",),
    "observers/minmax": OBSERVERS,
    "observers/topk": OBSERVERS,
    "weight_ranges": ("weight_ranges",),
    "smoothing": ("smoothing",),
    "resampling": ("resampling",),
    "proportions": ("proportions",),
    "observers/moments": OBSERVERS,
    "observers/bundle": ("bundle",),
    "observers/rows": OBSERVERS,
    "divergence": ("divergence",),
    "cells": ("distortion", "divergence", "choose"),
    "methods": ("methods", "choose"),
    "qtypes": ("qtypes", "affine"),
    "drawing": ("drawing",),
    "tokens": ("scan",),
    "threads": ("threads", "scan"),
    "kernels": ("scan",),
}
"""Module -> the test files in tests/numerics, most important modules first."""
KERNEL_TESTS = "not any_floats and not many_blocks and not threads"
CONFTEST = """from hypothesis import Phase, settings

settings.register_profile(
    "mutation",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile("mutation")
"""
GENERATE = """from pathlib import Path
from mutmut import __main__ as mutmut
Path("mutants").mkdir()
mutmut.set_mutant_under_test("mutant_generation")
mutmut.copy_src_dir(); mutmut.copy_also_copy_files(); mutmut.setup_source_paths()
mutmut.store_lines_covered_by_tests(); mutmut.create_mutants(1)
"""
DIFFS = """import json, sys
from pathlib import Path
from mutmut.mutation.diff_apply import get_diff_for_mutant
path = Path(sys.argv[1])
names = json.load(sys.stdin)
json.dump({name: get_diff_for_mutant(name, path=path) for name in names}, sys.stdout)
"""
KILLED, SURVIVED, UNTESTED = (1, 3), 0, 33
"""mutmut's codes; others, a signal among them, are timeouts."""


def _copy(module: str, folder: Path) -> Path:
    """Makes the copy that is mutated and returns the module's path in it."""
    package = folder / "quantkit"
    package.mkdir()
    shutil.copytree(NUMERICS, package / "numerics", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / "quantkit" / name, package)
    tests = folder / "tests" / "numerics"
    shutil.copytree(
        ROOT / "tests" / "numerics", tests, ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "tests" / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    path = Path("quantkit/numerics") / f"{module}.py"
    arguments, ignored = ["-p", "no:cacheprovider"], []
    if module == "kernels":
        source = (folder / path).read_text(encoding="utf-8")
        (folder / path).write_text(re.sub(r"(?m)^@njit.*\n", "", source), encoding="utf-8")
        arguments += ["-k", KERNEL_TESTS]
        ignored = ["ignore::RuntimeWarning"]  # numpy speaks of what compiled code overflows in
    selected = [f"tests/numerics/test_{name}.py" for name in TESTED_BY[module]]
    lines = (
        "[tool.pytest.ini_options]",
        'addopts = ["--import-mode=importlib"]',
        f"filterwarnings = {json.dumps(['error', *ignored])}",
        'markers = ["kind(number, *stages): reliability"]',
        "[tool.mutmut]",
        'source_paths = ["quantkit"]',
        f"only_mutate = {json.dumps([str(path)])}",
        f"pytest_add_cli_args = {json.dumps(arguments)}",
        f"pytest_add_cli_args_test_selection = {json.dumps(selected)}",
        "timeout_multiplier = 3.0",
        "timeout_constant = 5.0",
        "track_dependencies = false",
        "use_git_change_detection = false",
    )
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _python(code: str, folder: Path, *args: str, given: str = "") -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def mutate(module: str, most: int, seed: int) -> dict[str, Any]:
    """Returns the module's row: counts, seconds and the survivors with their changes.

    Raises:
        SystemExit: mutmut did not end, or the tests fail without a fault.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="quantkit-mutation-") as name:
        folder = Path(name)
        path = _copy(module, folder)
        _python(GENERATE, folder)
        meta = folder / "mutants" / f"{path}.meta"
        names = sorted(json.loads(meta.read_text())["exit_code_by_key"])
        taken = sorted(random.Random(seed).sample(names, min(most, len(names))))
        command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", "1"]
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            command + (taken if len(taken) < len(names) else []),
            cwd=folder,
            env=os.environ | threads,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{module}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        found = {name: codes[name] for name in taken}
        alive = [name for name, code in found.items() if code in (SURVIVED, UNTESTED)]
        diffs = json.loads(_python(DIFFS, folder, str(path), given=json.dumps(alive)))
        source = (folder / path).read_text(encoding="utf-8")
    counts = Counter(
        "killed" if code in KILLED else "survived" if code in (SURVIVED, UNTESTED) else "timeout"
        for code in found.values()
    )
    return {
        "module": module,
        "tested_by": list(TESTED_BY[module]),
        "mutants": len(names),
        "tried": len(taken),
        "killed": counts["killed"],
        "timeout": counts["timeout"],
        "survived": counts["survived"],
        "never_run": sum(code == UNTESTED for code in found.values()),
        "seconds": round(time.perf_counter() - started),
        "survivors": [_survivor(name, diffs[name], source) for name in alive],
    }


def _survivor(name: str, diff: str, source: str) -> dict[str, Any]:
    """Returns where a mutant is and what it changes: the lines taken out and put in."""
    mangled = name.rsplit(".", 1)[-1].rsplit("__mutmut_", 1)[0]
    parts = mangled.split("\u01c1")
    where = ".".join(parts[1:]) if len(parts) > 1 else mangled.removeprefix("x_")
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    minus = [line[1:].strip() for line in lines if line.startswith("-")]
    plus = [line[1:].strip() for line in lines if line.startswith("+")]
    return {
        "in": where,
        "minus": " ".join(minus),
        "plus": " ".join(plus),
        "is_text": all(line in _texts(source) for line in minus),
    }


def _texts(source: str) -> set[str]:
    """Returns the lines, stripped, that stand inside a `raise` and nowhere else."""
    lines = [line.strip() for line in source.splitlines()]
    inside = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    outside = {line for number, line in enumerate(lines, 1) if number not in inside}
    return {lines[number - 1] for number in inside} - outside


def explained(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with a class and a reason at each survivor, and counts of the classes."""
    rules = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else []
    for row in rows:
        for survivor in row["survivors"]:
            place = f"{row['module']}.{survivor['in']}"
            change = f"- {survivor['minus']} + {survivor['plus']}"
            rule = next(
                (
                    rule
                    for rule in rules
                    if re.search(rule["where"], place) and re.search(rule["change"], change)
                ),
                None,
            )
            if survivor["is_text"]:
                survivor |= {"class": "error text", "why": "a message, not what is decided"}
            elif rule is None:
                survivor |= {"class": "unexplained", "why": ""}
            else:
                survivor |= {"class": rule["class"], "why": rule["why"]}
        classes = Counter(survivor["class"] for survivor in row["survivors"])
        row["classes"] = dict(sorted(classes.items()))
    return list(rows)


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'module':<22} {'tried':>6} {'of':>6} {'killed':>7} {'timeout':>8} {'survived':>9}")
    for row in rows:
        print(
            f"{row['module']:<22} {row['tried']:>6} {row['mutants']:>6} {row['killed']:>7} "
            f"{row['timeout']:>8} {row['survived']:>9}  "
            + ", ".join(f"{count} {name}" for name, count in row["classes"].items())
        )


def main() -> None:
    """Mutates module after module, writes the file after each, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", default=",".join(TESTED_BY))
    parser.add_argument("--most", type=int, default=250, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    modules = [] if options.explain else options.modules.split(",")
    unknown = [module for module in modules if module not in TESTED_BY]
    if unknown:
        parser.error(f"unknown modules {', '.join(unknown)}; known: {', '.join(TESTED_BY)}")
    kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    rows = {row["module"]: row for row in kept.get("modules", [])}
    for module in modules:
        rows[module] = mutate(module, options.most, options.seed)
        print(f"{module}: {rows[module]['seconds']} s", file=sys.stderr, flush=True)
        _write(options.out, rows, options.seed, kept)
    _write(options.out, rows, options.seed, kept)
    _print_table([rows[module] for module in TESTED_BY if module in rows])


def _write(out: Path, rows: dict[str, dict[str, Any]], seed: int, kept: dict[str, Any]) -> None:
    ordered = explained([rows[module] for module in TESTED_BY if module in rows])
    sums = {
        name: sum(row[name] for row in ordered)
        for name in ("mutants", "tried", "killed", "timeout", "survived", "seconds")
    }
    classes: Counter[str] = Counter()
    for row in ordered:
        classes.update(row["classes"])
    result = {
        "what": "faults planted in quantkit/numerics, one at a time, and whether its tests fail",
        "command": "python benchmarks/mutation.py",
        "tester": "mutmut 3.8.1",
        "environment": kept.get("environment") or environment(),
        "seed": seed,
        **sums,
        "classes": dict(sorted(classes.items())),
        "modules": ordered,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
