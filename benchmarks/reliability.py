"""Writes `reports/reliability/README.md`: kinds of failure, how they are tested, what was found.

Cases are the tests that carry `@pytest.mark.kind(NUMBER, STAGE, ...)`, counted by pytest's own
collection (`results/reliability.json`); kills, fuzz, mutants and coverage are what their benchmarks
left in `benchmarks/results`; what failed and was changed is in `reports/reliability/found.toml`.

    python benchmarks/reliability.py
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import tables  # noqa: E402

FOLDER = ROOT / "reports" / "reliability"
PAGE = FOLDER / "README.md"
FOUND = FOLDER / "found.toml"
COUNTS = tables.RESULTS / "reliability.json"
KINDS = {
    1: "mask values in ranges; padded, fully masked and packed rows",
    2: "scales of 0, inf, NaN, subnormal; constants; tensors never executed",
    3: "half precision that overflows; counts beyond 2^24 and 2^31",
    4: "batch size, order, processes, resumption: the same result",
    5: "the axis of a channel",
    6: "opsets and domains, int4, external data, paths, disks, links",
    7: "hooks that stay; compiled, training, shared and moved models",
    8: "corrupt and hostile input",
    9: "kill -9",
    10: "random input to parsers",
}
STAGES = (
    "numerics", "probes", "calib_sets", "models", "stats", "calibrate", "sensitivity", "sweep",
    "export", "auto", "diagnose", "compare", "train", "report", "api", "cli",
)  # fmt: skip
Counts = Mapping[str, Mapping[str, int]]
"""Kind -> stage -> tests; `all` counts each test once."""


class Collector:
    """Counts marked tests as pytest collects them."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {str(kind): Counter() for kind in KINDS}

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            stages: dict[str, set[str]] = {}
            for marker in item.iter_markers("kind"):
                number, *named = marker.args
                stages.setdefault(str(number), set()).update(named)
            for number, named in stages.items():
                unknown = named - set(STAGES)
                if unknown or number not in self.counts:
                    raise pytest.UsageError(f"{item.nodeid}: no kind {number} or stages {unknown}")
                self.counts[number].update(["all", *named])


def collected() -> Counts:
    """Returns how many tests show each kind in each stage."""
    collector = Collector()
    code = pytest.main(["--collect-only", "-qq", "--no-header", str(ROOT)], plugins=[collector])
    if code:
        raise SystemExit(f"pytest could not collect the tests: {code!r}")
    return {kind: dict(sorted(found.items())) for kind, found in collector.counts.items()}


def found() -> list[dict[str, Any]]:
    """Returns what failed: kind, what, what was changed, the test that shows it."""
    entries: list[dict[str, Any]] = tomllib.loads(FOUND.read_text(encoding="utf-8"))["found"]
    return entries


def page(counts: Counts) -> str:
    """Returns the whole page."""
    entries = found()
    parts = [
        "# Hard to break",
        "Kinds of failure that users of this field's tools report, how many tests of `make test` "
        "try each, and what they found here. `make bench` counts the tests and writes this page "
        "anew; the kills, the fuzz run and the mutants below are its own.",
        kinds(counts, entries),
        "## Where each kind is tried",
        "Tests by kind and stage; a test may show a kind in several.",
        matrix(counts),
        "## What was found and changed",
        *(
            f"### {number}. {words}\n\n"
            + "\n".join(
                f"- {each['failed']} {each['changed']} (`{each['test']}`)"
                for each in entries
                if each["kind"] == number
            )
            for number, words in KINDS.items()
            if any(each["kind"] == number for each in entries)
        ),
        "## Kills",
        kills(tables.results("kills")),
        "## Random input",
        fuzz(tables.results("fuzz")),
        "## Mutants of `quantkit/numerics`",
        mutation(tables.results("mutation")),
        "## Lines and branches",
        coverage(tables.results("line_coverage")),
    ]
    return "\n\n".join(parts) + "\n"


def kinds(counts: Counts, entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first table: kind, cases, failures found."""
    rows = []
    for number, words in KINDS.items():
        failures = [each for each in entries if each["kind"] == number]
        rows.append(
            [
                str(number),
                words,
                f"{counts[str(number)].get('all', 0):,}{_more(number)}",
                str(len(failures)),
            ]
        )
    return tables.markdown(["", "kind", "cases", "failures found and mended"], rows)


def _more(number: int) -> str:
    """Returns what `make bench` adds to the tests of a kind."""
    if number == 9:
        commands = tables.results("kills")["commands"].values()
        cases = sum(sum(each["cases"].values()) for each in commands)
        return f" and {cases:,} kills"
    if number == 10:
        cases = tables.results("fuzz")["cases"]
        return f" and {cases:,} of the fuzz run"
    return ""


def matrix(counts: Counts) -> str:
    """Returns tests by kind and stage."""
    used = [stage for stage in STAGES if any(stage in each for each in counts.values())]
    rows = [
        [str(number), *(str(counts[str(number)].get(stage, "")) for stage in used)]
        for number in KINDS
    ]
    return tables.markdown(["", *used], rows)


def kills(found: Mapping[str, Any]) -> str:
    """Returns how often each command was killed, and what did not hold afterwards."""
    kinds = list(next(iter(found["commands"].values()))["cases"])
    rows = [
        [
            f"`{name}`",
            f"{each['run_s']:.1f} s",
            str(each["write_points"]),
            *(str(each["cases"][kind]) for kind in kinds),
            str(len(each["failures"])),
        ]
        for name, each in found["commands"].items()
    ]
    text = tables.markdown(["", "a run", "points of writing", *kinds, "failures"], rows)
    return (
        f"{text}\n\nTiny models, so that a run takes seconds. After each kill every file under a "
        "final name was read whole, the same command ended with exit code 0, and what it wrote was "
        "what an uninterrupted run writes (`benchmarks/kills.py`). Failures are those of the code "
        "as it is now."
    )


def fuzz(found: Mapping[str, Any]) -> str:
    """Returns the cases of the fuzz run by parser."""
    rows = [
        [
            f"`{each['target']}`",
            each["stage"],
            *(f"{each[key]:,}" for key in ("cases", "accepted", "refused", "failed")),
        ]
        for each in found["targets"]
    ]
    head = ["input", "stage", "cases", "read, round trip", "refused in one line", "failed"]
    return (
        f"{tables.markdown(head, rows)}\n\n{found['cases']:,} cases from seed {found['seed']} "
        f"(`{found['command']}`): other errors, errors of several lines, more than 2 s and more "
        "than 200 MB count as failed."
    )


def mutation(found: Mapping[str, Any]) -> str:
    """Returns mutants by module, and why the survivors survived."""
    rows = [
        [
            f"`{each['module']}`",
            *(f"{each[key]:,}" for key in ("mutants", "tried", "killed", "timeout", "survived")),
            ", ".join(f"{count} {word}" for word, count in each["classes"].items()),
        ]
        for each in found["modules"]
    ]
    head = ["module", "mutants", "tried", "killed", "timeout", "survived", "of these"]
    caught = found["killed"] + found["timeout"]
    return (
        f"{tables.markdown(head, rows)}\n\n{found['tester']}: of {found['tried']:,} mutants (a "
        f"seeded sample of {found['mutants']:,}) the module's own tests noticed {caught:,} "
        f"({100 * caught / found['tried']:.0f} %). A survivor is `equivalent` where no input tells "
        "it from the original, `speed only` or `search effort` where the result is the same or as "
        "good, `margin` where a tolerance of a guard moves; `unexplained` ones are gaps. Each "
        "stands with its change in `benchmarks/results/mutation.json`."
    )


def coverage(found: Mapping[str, Any]) -> str:
    """Returns lines and branches by package."""
    rows = [
        [
            f"`{each['package']}`",
            f"{each['statements']:,}",
            f"{each['lines_pct']:.1f} %",
            f"{each['branches']:,}",
            f"{each['branches_pct']:.1f} %",
        ]
        for each in found["packages"]
    ]
    head = ["package", "lines", "run by their tests", "branches", "run by their tests"]
    return (
        f"{tables.markdown(head, rows)}\n\n{found['tool']}, without the compiled loops; lines that "
        "no test runs stand in `benchmarks/results/line_coverage.json`."
    )


def written_page() -> str:
    """Returns the page from the counts that stand in `results/reliability.json`."""
    return page(tables.results("reliability"))


def main() -> None:
    """Counts the tests, writes counts and page."""
    counts = collected()
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(counts), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
