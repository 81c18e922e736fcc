"""The benchmarks of `make bench`, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command; `result` is the file in `benchmarks/results` that it writes, if it has one."""

    name: str
    words: str
    command: str
    result: str | None = None


_TASKS = (
    "multiple-choice=benchmarks/data/step_inference.jsonl,"
    "multiple-choice=benchmarks/data/social_iqa.jsonl"
)

PARTS: tuple[Part, ...] = (
    Part(
        name="recording",
        words="Recording statistics",
        command="python benchmarks/recording.py",
        result="recording",
    ),
    Part(
        name="memory",
        words="Memory of stats and calibrate",
        command="python benchmarks/memory.py",
        result="memory",
    ),
    Part(
        name="monitor",
        words="The monitor of a training",
        command="python benchmarks/monitor.py --threads 1",
        result="monitor",
    ),
    Part(
        name="calibration",
        words="Calibration of an ONNX graph",
        command="python benchmarks/calibration.py --rounds 2",
        result="calibration",
    ),
    Part(
        name="ranges",
        words="What ranges cost",
        command="python benchmarks/ranges.py",
        result="ranges",
    ),
    Part(
        name="logits",
        words="A forward that is quantized as it runs",
        command="python benchmarks/logits.py --rounds 3 --seq-lens 512,1024,2048,4096",
        result="logits",
    ),
    Part(
        name="growth",
        words="How the commands grow",
        command="python benchmarks/growth.py",
        result="growth",
    ),
    Part(
        name="auto",
        words="The export that the next one compares",
        command=(
            "quantkit export smollm2 --quantize auto --max-drop 2% --seq-len 256 "
            "--search-samples 32 --out reports/auto"
        ),
    ),
    Part(
        name="export_peers",
        words="Exports of one model by every tool",
        command="python benchmarks/export_peers.py --ours reports/auto",
        result="export_peers",
    ),
    Part(
        name="pair_logits",
        words="Graphs beside the simulation, item by item",
        command="python benchmarks/pair_logits.py",
        result="pair_logits",
    ),
    Part(
        name="clients",
        words="Exports in optimum",
        command="python benchmarks/clients.py",
    ),
    Part(
        name="bigbench-fetch",
        words="Items of BIG-bench",
        command=(
            "python -m pip download --no-deps --no-binary :all: -d benchmarks/data bigbench==1.0.0"
        ),
    ),
    Part(
        name="bigbench",
        words="Their conversion",
        command="python benchmarks/bigbench.py --archive benchmarks/data/bigbench-1.0.0.tar.gz",
    ),
    Part(
        name="bigbench-sweep",
        words="SmolLM2 on them",
        command=(
            "quantkit sweep smollm2 --items 200 --granularity tensor,row --batch-size 16 "
            f"--out reports/bigbench --task {_TASKS}"
        ),
    ),
    Part(
        name="bigbench-report",
        words="Their page",
        command="quantkit report reports/bigbench",
    ),
    Part(
        name="kills",
        words="SIGKILL at points of writing and at random moments",
        command="python benchmarks/kills.py",
    ),
    Part(name="fuzz", words="Parsers under random input", command="python benchmarks/fuzz.py"),
    Part(
        name="mutation",
        words="Mutants of numerics that the tests see",
        command="python benchmarks/mutation.py",
    ),
    Part(
        name="line-coverage",
        words="Lines and branches that the tests run",
        command="python benchmarks/line_coverage.py",
    ),
    Part(
        name="reliability",
        words="The page of failures",
        command="python benchmarks/reliability.py",
    ),
)
