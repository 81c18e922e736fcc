"""Peak memory of `stats` and `calibrate` on SmolLM2, over sequence length and number of samples.

`every-point` is calibrate with a range for everything that can have one.

Each point is a fresh process: load, run once on 16 tokens, then count how far the resident set
rises above where it stood. `forward` is the model alone, without probes. Batch 1, float32.
Linux only: the peak is VmHWM, reset through /proc/self/clear_refs.

    python benchmarks/memory.py [--commands stats,calibrate] [--seq-lens 512,1024]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SEQ_LENS = (512, 1024, 2048, 4096)
SAMPLES = (1, 2, 4, 8)
COMMANDS = ("forward", "stats", "calibrate", "every-point")
OUT = Path(__file__).parent / "results" / "memory.json"


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def _child(command: str, seq_len: int, samples: int) -> dict[str, Any]:
    """Returns one point, measured in this process."""
    import torch

    from quantkit.calib_sets import TokenSlice, text_slice
    from quantkit.calibration import RangePlan, choose_ranges, observe, ranges_now
    from quantkit.jobs import CALIBRATION_POINTS, DEFAULT_CALIBRATION_POINTS
    from quantkit.models import backbone, load
    from quantkit.numerics.methods import parse_methods
    from quantkit.outliers import collect

    loaded = load("smollm2")
    plan = RangePlan(methods=parse_methods("minmax", CALIBRATION_POINTS))

    def run(text: TokenSlice) -> None:
        if command == "stats":
            collect(loaded, text, batch_size=1)
        elif command in ("calibrate", "every-point"):
            points = CALIBRATION_POINTS if command == "every-point" else DEFAULT_CALIBRATION_POINTS
            recording = observe(
                loaded,
                text,
                points=points,
                choose=lambda seen: ranges_now(seen, plan),
                batch_size=1,
            )
            assert recording is not None
            choose_ranges(recording.seen, plan)
        else:
            with torch.inference_mode():
                for batch in text.batches(1):
                    backbone(loaded.model)(input_ids=batch.input_ids, use_cache=False)

    text = text_slice("pydoc", loaded.tokenizer, seq_len=seq_len, samples=samples)
    assert text.sequences == samples
    run(text_slice("pydoc", loaded.tokenizer, seq_len=16, samples=1))
    Path("/proc/self/clear_refs").write_text("5")
    before, started = _status_mib("VmRSS"), time.perf_counter()
    run(text)
    return {
        "command": command,
        "seq_len": seq_len,
        "samples": samples,
        "before_mib": round(before, 1),
        "growth_mib": round(_status_mib("VmHWM") - before, 1),
        "seconds": round(time.perf_counter() - started, 2),
    }


def _measure(command: str, seq_len: int, samples: int) -> dict[str, Any]:
    arguments = [sys.executable, __file__, "--point", command, str(seq_len), str(samples)]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    point: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return point


def _print_table(points: list[dict[str, Any]]) -> None:
    """Prints growth, and its ratio to the point before it of the same series."""
    print(f"{'command':<10} {'seq':>5} {'samples':>7} {'growth MiB':>11} {'ratio':>6} {'s':>7}")
    for command in COMMANDS:
        for axis, other, fixed in (("seq_len", "samples", 1), ("samples", "seq_len", SEQ_LENS[0])):
            series = [p for p in points if p["command"] == command and p[other] == fixed]
            series.sort(key=lambda p: p[axis])
            if len(series) < 2:
                continue
            before = None
            for point in series:
                ratio = "" if before is None else f"{point['growth_mib'] / before:.2f}"
                before = point["growth_mib"]
                print(
                    f"{command:<10} {point['seq_len']:>5} {point['samples']:>7} "
                    f"{point['growth_mib']:>11.1f} {ratio:>6} {point['seconds']:>7.1f}"
                )


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measures every point, prints the table; the file is written anew after each point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--seq-lens", type=_whole_numbers, default=list(SEQ_LENS))
    parser.add_argument("--samples", type=_whole_numbers, default=list(SAMPLES))
    parser.add_argument("--point", nargs=3, metavar=("COMMAND", "SEQ_LEN", "SAMPLES"))
    options = parser.parse_args()
    if options.point:
        command, seq_len, samples = options.point
        print(json.dumps(_child(command, int(seq_len), int(samples))))
        return
    import torch

    commands = options.commands.split(",")
    wanted = [(c, n, 1) for n in options.seq_lens for c in commands]
    wanted += [(c, SEQ_LENS[0], n) for n in options.samples if n > 1 for c in commands]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    points: list[dict[str, Any]] = []
    for command, seq_len, samples in wanted:
        points.append(_measure(command, seq_len, samples))
        print(points[-1], file=sys.stderr, flush=True)
        plain = {
            "what": "peak resident memory above the loaded, once-run model; smollm2, batch 1",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "points": points,
        }
        options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    _print_table(points)


if __name__ == "__main__":
    main()
