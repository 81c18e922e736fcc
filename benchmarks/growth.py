"""How the time and the memory of each command grow with samples, sequence length and layers.

One model family: a Llama of random weights (seeded; width 128, 4 heads, the shipped pair's
tokenizer) in 2 to 16 layers; the text is `pydoc`, float32, batch 1, one thread. One of the three is
varied at a time, the others stay at `BASE`. Each point is a process of its own, which first runs
the same command at the smallest size (imports, compiled kernels, page cache), then once more at the
point's size. Seconds are those of the second run, in processor time, which other work on the
machine moves little, and in wall time; memory is how far the resident set rises above where it
stood (VmHWM, Linux only). The whole command is measured, loading and writing too.

`exponent`: slope of log(figure) over log(size), by least squares, and its standard error: 1 is
linear, 0 is constant. Fixed costs pull it down: `last`, the slope between the two largest sizes,
has less of them. No exponent of memory where the rises differ by less than 16 MiB: that is `flat`.

    python benchmarks/growth.py [--commands stats,calibrate] [--quick]

`--quick` is a run to see that it works: two sizes an axis, nothing written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "results" / "growth.json"
AXES: dict[str, tuple[int, ...]] = {
    "samples": (8, 16, 32, 64),
    "seq_len": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
}
BASE = {"samples": 8, "seq_len": 256, "layers": 4}
SMALLEST = {"samples": 1, "seq_len": 32, "layers": 2}
FLAT_MIB = 16.0
WIDTH, HEADS, SEED = 128, 4, 0
TEXT = "pydoc"
Run = Callable[[Path, Path, Mapping[str, int]], object]
"""Given the model's folder, an empty folder and the size, runs the command."""


def _nothing(model: Path, out: Path, size: Mapping[str, int]) -> None:
    pass


def _ranges(model: Path, out: Path, size: Mapping[str, int]) -> object:
    """Makes the ranges that other commands are given; of few samples, not timed."""
    import quantkit

    return quantkit.calibrate(model, TEXT, samples=2, seq_len=64, out=out / "ranges")


def _stats(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.stats(
        model, TEXT, samples=size["samples"], seq_len=size["seq_len"], batch_size=1, out=out / "o"
    )


def _calibrate(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.calibrate(
        model, TEXT, samples=size["samples"], seq_len=size["seq_len"], batch_size=1, out=out / "o"
    )


def _sensitivity(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.sensitivity(
        model,
        ranges=out / "ranges",
        samples=size["samples"],
        seq_len=size["seq_len"],
        out=out / "o",
    )


def _sweep(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.sweep(
        model, eval=TEXT, bits=(16, 4), granularity=("head",), samples=size["samples"],
        seq_len=size["seq_len"], batch_size=1, out=out / "o",
    )  # fmt: skip


def _export(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.export(
        model, quantize="w8a8", ranges=out / "ranges", eval_samples=size["samples"],
        seq_len=size["seq_len"], out=out / "o",
    )  # fmt: skip


def _report(model: Path, out: Path, size: Mapping[str, int]) -> object:
    import quantkit

    return quantkit.report([out / "o"], out / "page")


RUNS: dict[str, tuple[Run, Run, tuple[str, ...]]] = {
    "stats": (_nothing, _stats, ("samples", "seq_len", "layers")),
    "calibrate": (_nothing, _calibrate, ("samples", "seq_len", "layers")),
    "sensitivity": (_ranges, _sensitivity, ("samples", "seq_len", "layers")),
    "sweep": (_nothing, _sweep, ("samples", "seq_len", "layers")),
    "export": (_ranges, _export, ("samples", "seq_len", "layers")),
    "report": (_stats, _report, ("layers",)),
}
"""By command: what is made for it beforehand, what runs it, and what it is measured over."""


def make_model(folder: Path, layers: int) -> None:
    """Saves a Llama of random weights and the shipped pair's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit.models import load

    tokenizer = load("baseline").tokenizer
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def measured(command: str, size: Mapping[str, int]) -> dict[str, Any]:
    """Returns one point, measured in this process."""
    import torch

    from quantkit.errors import GateError

    torch.set_num_threads(1)
    prepare, run, _ = RUNS[command]
    with tempfile.TemporaryDirectory() as aside:
        for turn, at in (("first", SMALLEST), ("second", size)):
            model, out = Path(aside) / f"model-{turn}", Path(aside) / turn
            out.mkdir()
            make_model(model, at["layers"])
            prepare(model, out, at)
            Path("/proc/self/clear_refs").write_text("5")
            before, started = _status_mib("VmRSS"), (time.process_time(), time.perf_counter())
            try:
                run(model, out, at)
            except GateError:  # random weights: what is measured is the work
                assert command == "export"
            processor, wall = time.process_time() - started[0], time.perf_counter() - started[1]
    return {
        "command": command,
        **size,
        "processor_s": round(processor, 3),
        "wall_s": round(wall, 3),
        "growth_mib": round(_status_mib("VmHWM") - before, 1),
    }


def slope(sizes: list[int], figures: list[float]) -> tuple[float, float]:
    """Returns the slope of log(figure) over log(size) and its standard error; NaN of two points."""
    x, y = [math.log(size) for size in sizes], [math.log(figure) for figure in figures]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    found = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if len(x) < 3:
        return found, math.nan
    left = sum((b - mean_y - found * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return found, math.sqrt(left / (len(x) - 2) / spread)


def fitted(points: list[dict[str, Any]], command: str, axis: str) -> dict[str, Any]:
    """Returns how the command grows with one of the three."""
    others = [other for other in BASE if other != axis]
    series = [p for p in points if p["command"] == command]
    series = [p for p in series if all(p[other] == BASE[other] for other in others)]
    series.sort(key=lambda point: int(point[axis]))
    sizes = [point[axis] for point in series]
    time_slope, time_error = slope(sizes, [point["processor_s"] for point in series])
    rises = [point["growth_mib"] for point in series]
    is_flat = max(rises) - min(rises) < FLAT_MIB
    memory = (None, None) if is_flat else slope(sizes, [max(rise, 0.1) for rise in rises])
    return {
        "command": command,
        "axis": axis,
        "sizes": sizes,
        "processor_s": [point["processor_s"] for point in series],
        "growth_mib": rises,
        "exponent": round(time_slope, 3),
        "standard_error": None if math.isnan(time_error) else round(time_error, 3),
        "last": round(slope(sizes[-2:], [p["processor_s"] for p in series[-2:]])[0], 3),
        "memory_exponent": None if memory[0] is None else round(memory[0], 3),
    }


def _sizes(
    commands: list[str], axes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, dict[str, int]]]:
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for command in commands:
        for axis in RUNS[command][2]:
            for value in axes[axis]:
                size = BASE | {axis: value}
                found[f"{command} {size}"] = (command, size)
    return list(found.values())


def _measure(command: str, size: Mapping[str, int]) -> dict[str, Any]:
    given = [sys.executable, __file__, "--point", command, json.dumps(size)]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True, check=True, env=surroundings)
    point: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return point


def _print_table(fits: list[dict[str, Any]]) -> None:
    print(f"{'command':<12} {'axis':<8} {'exponent':>9} {'last':>6} {'memory':>7}  seconds; MiB")
    for fit in fits:
        error = "" if fit["standard_error"] is None else f"±{fit['standard_error']:.2f}"
        memory = "flat" if fit["memory_exponent"] is None else f"{fit['memory_exponent']:.2f}"
        print(
            f"{fit['command']:<12} {fit['axis']:<8} {fit['exponent']:>4.2f}{error:<5} "
            f"{fit['last']:>6.2f} {memory:>7}  {fit['processor_s']}; {fit['growth_mib']}"
        )


def main() -> None:
    """Measures every point, fits, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--commands", default=",".join(RUNS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", nargs=2, metavar=("COMMAND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measured(options.point[0], json.loads(options.point[1]))))
        return
    from quantkit.results.environment import environment
    from quantkit.results.io import write_json

    commands = options.commands.split(",")
    axes = {axis: sizes[:2] if options.quick else sizes for axis, sizes in AXES.items()}
    points = []
    for command, size in _sizes(commands, axes):
        points.append(_measure(command, size))
        print(points[-1], file=sys.stderr, flush=True)
    fits = [fitted(points, command, axis) for command in commands for axis in RUNS[command][2]]
    _print_table(fits)
    if options.quick:
        return
    result = {
        "what": "processor seconds and MiB of whole commands on a Llama of random weights",
        "environment": environment(),
        "seed": SEED,
        "base": BASE,
        "points": points,
        "fits": fits,
    }
    write_json(options.out, result)


if __name__ == "__main__":
    main()
