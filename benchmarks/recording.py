"""What `quantkit stats` costs beside the model alone, and beside the usual way.

SmolLM2, float32, batch 1. Ratios of wall time against the same model's plain SDPA forward in the
same process, the two taken in turns; the median of the rounds. Memory: each point is a fresh
process that runs once on 16 tokens, then counts how far the resident set rises; `extra` is that
less the plain forward's. Linux only: the peak is VmHWM, reset through /proc/self/clear_refs.

    python benchmarks/recording.py [--seq-lens 2048,8192] [--rounds 3]

* `extremes`: attention logits' max, min and top-k on every row, hidden states in full (--rows 0);
* `all rows`: every statistic at every default point; `rows 512`: the same with --rows 512;
* `eager`: output_attentions=True and attn_implementation="eager", up to 2,048 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "results" / "recording.json"
MODES = {"extremes": (0, ()), "all rows": (None, None), "rows 512": (512, None)}
TARGETS = {
    (2048, "extremes"): 1.4,
    (8192, "extremes"): 2.0,
    (2048, "all rows"): 2.2,
    (8192, "all rows"): 3.0,
    (2048, "rows 512"): 1.6,
}
"""Ratios of time that were aimed at."""
TARGET_EXTRA_MIB = 200
EAGER_UP_TO = 2048
"""Its attention weights take 4.5 GB there, and 72 GB at four times the length."""


def _runs(seq_len: int, samples: int = 1) -> dict[str, Callable[[], None]]:
    """Returns what can be run, by name: the forward alone, with probes, and the usual way."""
    import torch

    from quantkit.calib_sets import text_slice
    from quantkit.models import backbone, load
    from quantkit.outliers.collect import ALONE, DEFAULT_POINTS, run
    from quantkit.outliers.maps import RowSampling
    from quantkit.outliers.statistics import ModelStatistics
    from quantkit.progress import silent

    loaded = load("smollm2")
    text = text_slice("pydoc", loaded.tokenizer, seq_len=seq_len, samples=samples)
    assert text.sequences == samples
    model = backbone(loaded.model)

    def forward(**options: Any) -> None:
        with torch.inference_mode():
            for batch in text.batches(1):
                model(**batch.inputs, use_cache=False, **options)

    def eager() -> None:
        before = loaded.model.config._attn_implementation
        loaded.model.set_attn_implementation("eager")
        try:
            forward(output_attentions=True)
        finally:
            loaded.model.set_attn_implementation(before)

    def probed(rows: int | None, points: tuple[str, ...] | None) -> None:
        chosen = DEFAULT_POINTS if points is None else points
        recording = ModelStatistics.of(chosen, RowSampling(rows=rows))
        run(recording, loaded, text, batch_size=1, processes=ALONE, progress=silent)

    def mode(name: str) -> Callable[[], None]:
        return lambda: probed(*MODES[name])

    return {"plain": forward, "eager": eager, **{name: mode(name) for name in MODES}}


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def times(seq_len: int, rounds: int, *, with_eager: bool) -> list[dict[str, Any]]:
    """Returns the ratio of each mode to the plain forward, the two taken in turns."""
    runs = _runs(seq_len)
    for name in ("plain", "all rows"):  # compiles, fills caches
        runs[name]()
    ratios: dict[str, list[float]] = {}
    plain: list[float] = []
    for _ in range(rounds):
        for name in [*MODES, *(["eager"] if with_eager else [])]:
            plain.append(_seconds(runs["plain"]))
            ratios.setdefault(name, []).append(_seconds(runs[name]) / plain[-1])
            gc.collect()
    return [
        {
            "seq_len": seq_len,
            "mode": name,
            "ratio": round(statistics.median(values), 3),
            "ratios": [round(value, 3) for value in values],
            "plain_s": round(statistics.median(plain), 3),
            "target": TARGETS.get((seq_len, name)),
        }
        for name, values in ratios.items()
    ]


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def growth(seq_len: int, mode: str, samples: int) -> float:
    """Returns how far the resident set of this process rises in one run, MiB."""
    runs = _runs(16)
    for name in ("plain", mode):
        runs[name]()
    runs = _runs(seq_len, samples)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mib("VmRSS")
    runs[mode]()
    return round(_status_mib("VmHWM") - before, 1)


def memory(seq_len: int, *, with_eager: bool) -> list[dict[str, Any]]:
    """Returns the growth of each mode in a process of its own, and what is beyond the forward's."""
    found: dict[tuple[str, int], float] = {}
    wanted = [("plain", 1), *((name, 1) for name in MODES)]
    if with_eager:
        wanted += [("eager", 1), ("plain", 4), ("all rows", 4)]
    for mode, samples in wanted:
        command = [sys.executable, __file__, "--growth", str(seq_len), mode, str(samples)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[mode, samples] = float(done.stdout.splitlines()[-1])
        print(seq_len, mode, samples, found[mode, samples], "MiB", file=sys.stderr, flush=True)
    return [
        {
            "seq_len": seq_len,
            "mode": mode,
            "samples": samples,
            "growth_mib": value,
            "extra_mib": round(value - found["plain", samples], 1),
        }
        for (mode, samples), value in found.items()
    ]


def main() -> None:
    """Measures, writes the file, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-lens", default="2048,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--growth", nargs=3, metavar=("SEQ_LEN", "MODE", "SAMPLES"))
    options = parser.parse_args()
    if options.growth:
        seq_len, mode, samples = options.growth
        print(growth(int(seq_len), mode, int(samples)))
        return
    import torch

    seq_lens = [int(part) for part in options.seq_lens.split(",")]
    result: dict[str, Any] = {
        "what": "time as a ratio to a plain SDPA forward, memory in MiB; smollm2, batch 1, float32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "times": [],
        "memory": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seq_len in seq_lens:
        has_room = seq_len <= EAGER_UP_TO
        result["times"] += times(seq_len, options.rounds, with_eager=has_room)
        result["memory"] += memory(seq_len, with_eager=has_room)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'tokens':>6} {'mode':<10} {'x forward':>9} {'target':>7}")
    for point in result["times"]:
        target = "" if point["target"] is None else f"{point['target']:.1f}"
        print(f"{point['seq_len']:>6} {point['mode']:<10} {point['ratio']:>9.2f} {target:>7}")
    print(
        f"{'tokens':>6} {'mode':<10} {'samples':>7} {'extra MiB':>9}  (target {TARGET_EXTRA_MIB})"
    )
    for point in result["memory"]:
        print(
            f"{point['seq_len']:>6} {point['mode']:<10} {point['samples']:>7} "
            f"{point['extra_mib']:>9.0f}"
        )


if __name__ == "__main__":
    main()
