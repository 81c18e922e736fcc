"""What a forward with quantized attention costs SmolLM2, beside the plain one and the eager way.

Float32, batch 1, the decoder without its vocabulary head, whose cost would hide that of attention.
`eager` is what anybody would write: a function in transformers' `AttentionInterface` that makes the
whole `[heads, query, key]` matrix, puts it on the grid of its valid entries' absmax and takes the
softmax. Before anything is measured every layer must give quantkit's numbers so (`rows_apart_frac`:
where float rounding has moved a logit over the middle between two steps).

* Time: at `--seq-len` tokens the modes are run in turns, `--rounds` times; the minimum and the
  median of each, as ratios to those of the plain SDPA forward.
* Memory: each point is a fresh process that runs once on 16 tokens, then counts how far the
  resident set rises (`growth`); `extra` is that less the plain forward's. `exponent` is the slope
  of log growth over log tokens, by least squares over the lengths from 1,024 on: 1 is linear, 2 is
  quadratic; of `extra` too, where every one is above 8 MiB (the allocator's noise).
  Linux only: the peak is VmHWM, reset through /proc/self/clear_refs.

    python benchmarks/logits.py [--quick] [--seq-len 1024] [--rounds 5] [--seq-lens 512,1024]

`--quick` is a run of a minute or two to see that it works: few modes, short texts, nothing written.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from quantkit.calib_sets import TokenSlice, text_slice
from quantkit.calibration import RangePlan, choose_ranges, observe, ranges_now
from quantkit.models import LoadedModel, backbone, load
from quantkit.numerics.methods import parse_methods
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from quantkit.results import Range
from quantkit.results.environment import environment

OUT = Path(__file__).parent / "results" / "logits.json"
RECIPES = (
    "logits4", "logits4:head", "logits4:row",
    "logits4:asymmetric", "logits4:head:asymmetric", "logits4:row:asymmetric",
    "logits4:head:static", "qk8", "probs8", "kv8", "logits4+probs8:head",
)  # fmt: skip
GRANULARITIES = ("tensor", "head", "row")
PLAIN = "plain"
EAGER = tuple(f"eager {granularity}" for granularity in GRANULARITIES)
BITS = 4
TARGET = 2.0
"""Ratio of time of a forward with quantized logits to the plain one that was aimed at."""
SEQ_LENS = (512, 1024, 2048, 4096, 8192)
EAGER_UP_TO = 4096
"""There its three matrices of 9 heads take 1.8 GB."""
IN_MEMORY = (PLAIN, "logits4", "logits4:head", "logits4:row", "logits4+probs8:head", "eager tensor")
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What is freed goes back at once: else what loading has freed hides what a forward takes."""
FIT_FROM = 1024
LEAST_EXTRA_MIB = 8
QUICK = ("logits4", "logits4:head:static", "logits4+probs8:head", "eager tensor")
CALIBRATED = 4
"""Blocks of text that the static ranges are chosen on."""
ROUNDING = 1e-5
"""Relative difference that adding up in another order makes."""
MOST_ROWS_APART_FRAC = 0.01
"""Share of rows where rounding may move a logit over the middle between two steps."""


def _eager(granularity: str) -> Callable[..., tuple[Tensor, None]]:
    """Returns attention with fake-quantized logits as one would write it down."""
    axes = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
    top = 2 ** (BITS - 1) - 1

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        logits = query @ key.transpose(2, 3) * scaling
        scale = logits.masked_fill(~attention_mask, 0.0).abs().amax(axes, keepdim=True) / top
        logits = (logits / scale).round().clamp(-top, top) * scale
        weights = logits.masked_fill(~attention_mask, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    return attention


def _full_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Returns the boolean mask of a forward, which is never left out."""
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(*args, **kwargs | options)
    assert mask is not None
    return mask


for _granularity in GRANULARITIES:
    AttentionInterface.register(f"plainly_{_granularity}", _eager(_granularity))
    AttentionMaskInterface.register(f"plainly_{_granularity}", _full_mask)


@contextmanager
def _as(model: Any, mode: str, ranges: Mapping[str, Range]) -> Iterator[None]:
    """Lets the model run in a mode: plain, a recipe, or the eager way."""
    if mode == PLAIN:
        yield
    elif mode in EAGER:
        before = model.config._attn_implementation
        model.set_attn_implementation(f"plainly_{mode.removeprefix('eager ')}")
        try:
            yield
        finally:
            model.set_attn_implementation(before)
    else:
        with fake_quantized(model, Recipe.parse(mode), ranges):
            yield


def _static_ranges(loaded: LoadedModel, seq_len: int) -> Mapping[str, Range]:
    """Returns min-max ranges of the logits, on blocks behind the one that is timed."""
    plan = RangePlan(methods=parse_methods("minmax", ("attention_logit",)))
    recording = observe(
        loaded,
        text_slice("pydoc", loaded.tokenizer, seq_len=seq_len, samples=CALIBRATED, skip=1),
        points=("attention_logit",),
        choose=lambda seen: ranges_now(seen, plan),
        batch_size=1,
    )
    assert recording is not None
    return choose_ranges(recording.seen, plan)


def _forward(loaded: LoadedModel, text: TokenSlice) -> Tensor:
    """Returns the last hidden state, `[1, token, channel]`."""
    with torch.inference_mode():
        (batch,) = text.batches(1)
        out: Tensor = backbone(loaded.model)(input_ids=batch.input_ids, use_cache=False)[0]
        return out


def agreement(loaded: LoadedModel, text: TokenSlice) -> dict[str, float]:
    """Returns the share of rows whose attention is another one in the eager way, by granularity.

    Each layer is given the same input in both ways: thirty layers in a row would magnify one logit
    that rounding moves to the next step into another text.

    Raises:
        SystemExit: they compute different things.
    """
    layers = loaded.model.model.layers
    found = {}
    for granularity in GRANULARITIES:
        inputs: list[Tensor] = []
        ours: list[Tensor] = []
        eager: list[Tensor] = []

        def given(_layer: nn.Module, args: Any, inputs: list[Tensor] = inputs) -> None:
            inputs.append(args[0])

        def same(_layer: nn.Module, args: Any, inputs: list[Tensor] = inputs) -> Any:
            return (inputs.pop(0), *args[1:])

        for mode, before, outputs in (
            (f"logits{BITS}:{granularity}", given, ours),
            (f"eager {granularity}", same, eager),
        ):
            hooks = [layer.register_forward_pre_hook(before) for layer in layers]
            hooks += [
                layer.self_attn.register_forward_hook(
                    lambda _module, _args, out, outputs=outputs: outputs.append(out[0][0])
                )
                for layer in layers
            ]
            try:
                with _as(loaded.model, mode, {}):
                    _forward(loaded, text)
            finally:
                for hook in hooks:
                    hook.remove()
        apart = [
            (mine - other).norm(dim=-1) > ROUNDING * mine.norm(dim=-1)
            for mine, other in zip(ours, eager, strict=True)
        ]
        found[granularity] = float(torch.stack(apart).float().mean())
        if found[granularity] > MOST_ROWS_APART_FRAC:
            raise SystemExit(
                f"eager {granularity}: {found[granularity]:.1%} of the rows differ from quantkit's"
            )
    return found


def times(
    loaded: LoadedModel, text: TokenSlice, modes: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Returns the ratios of each mode to the plain forward, all of them run in turns."""
    ranges = _static_ranges(loaded, text.seq_len)
    seconds: dict[str, list[float]] = {mode: [] for mode in (PLAIN, *modes)}
    for turn in range(rounds + 1):
        for mode, taken in seconds.items():
            with _as(loaded.model, mode, ranges):
                started = time.perf_counter()
                _forward(loaded, text)
                if turn:  # the first fills caches
                    taken.append(time.perf_counter() - started)
            gc.collect()
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    fastest, median = min(seconds[PLAIN]), statistics.median(seconds[PLAIN])
    return [
        {
            "mode": mode,
            "min_ratio": round(min(taken) / fastest, 3),
            "median_ratio": round(statistics.median(taken) / median, 3),
            "min_s": round(min(taken), 4),
            "median_s": round(statistics.median(taken), 4),
            "target": TARGET if mode.startswith("logits") else None,
        }
        for mode, taken in seconds.items()
    ]


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def growth(mode: str, seq_len: int) -> float:
    """Returns how far the resident set of this process rises in one forward, MiB."""
    loaded = load("smollm2")
    short, long = (
        text_slice("pydoc", loaded.tokenizer, seq_len=n, samples=1) for n in (16, seq_len)
    )
    with _as(loaded.model, mode, {}):
        _forward(loaded, short)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_mib("VmRSS")
        _forward(loaded, long)
        return round(_status_mib("VmHWM") - before, 1)


def memory(modes: Sequence[str], seq_lens: Sequence[int], threads: int) -> list[dict[str, Any]]:
    """Returns the growth of each mode at each length, and what is beyond the plain forward's."""
    points: list[dict[str, Any]] = []
    for seq_len in seq_lens:
        plain = 0.0
        for mode in modes:
            if mode in EAGER and seq_len > EAGER_UP_TO:
                continue
            command = [sys.executable, __file__, "--threads", str(threads)]
            command += ["--growth", mode, str(seq_len)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | GLIBC
            )
            grown = float(done.stdout.splitlines()[-1])
            plain = grown if mode == PLAIN else plain
            point = {"mode": mode, "seq_len": seq_len, "growth_mib": grown}
            points.append(point | {"extra_mib": round(grown - plain, 1)})
            print(points[-1], file=sys.stderr, flush=True)
    return points


def exponents(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the slopes of log memory over log tokens, a row a mode."""

    def slope(series: Sequence[dict[str, Any]], name: str) -> float | None:
        if len(series) < 2 or min(point[name] for point in series) < LEAST_EXTRA_MIB:
            return None
        tokens, mib = ([np.log(point[key]) for point in series] for key in ("seq_len", name))
        return round(float(np.polyfit(tokens, mib, 1)[0]), 3)

    found = []
    for mode in dict.fromkeys(point["mode"] for point in points):
        series = [p for p in points if p["mode"] == mode and p["seq_len"] >= FIT_FROM]
        extra = None if mode == PLAIN else slope(series, "extra_mib")
        row = {"mode": mode, "growth": slope(series, "growth_mib"), "extra": extra}
        found.append(row | {"seq_lens": [point["seq_len"] for point in series]})
    return found


def _print_tables(result: dict[str, Any]) -> None:
    print(f"{'mode':<26} {'x plain, min':>12} {'median':>7} {'s':>8} {'target':>7}")
    for row in result["times"]:
        target = "" if row["target"] is None else f"{row['target']:.1f}"
        print(
            f"{row['mode']:<26} {row['min_ratio']:>12.2f} {row['median_ratio']:>7.2f} "
            f"{row['median_s']:>8.3f} {target:>7}"
        )
    print(f"{'mode':<26} {'tokens':>7} {'growth MiB':>11} {'extra MiB':>10}")
    for row in result["memory"]:
        print(
            f"{row['mode']:<26} {row['seq_len']:>7} {row['growth_mib']:>11.1f} "
            f"{row['extra_mib']:>10.1f}"
        )
    print(f"{'mode':<26} {'exponent':>9} {'of extra':>9}")
    for row in result["exponents"]:
        shown = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("growth", "extra")]
        print(f"{row['mode']:<26} {shown[0]:>9} {shown[1]:>9}")


def main() -> None:
    """Measures, prints the tables and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq-lens", default=",".join(map(str, SEQ_LENS)))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--growth", nargs=2, metavar=("MODE", "SEQ_LEN"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.growth:
        mode, seq_len = options.growth
        print(growth(mode, int(seq_len)))
        return
    if options.quick:
        options.seq_len, options.rounds, options.seq_lens = 256, 2, "1024,2048"
    modes = QUICK if options.quick else (*RECIPES, *EAGER)
    in_memory = (PLAIN, "logits4", "eager tensor") if options.quick else IN_MEMORY
    loaded = load("smollm2")
    text = text_slice("pydoc", loaded.tokenizer, seq_len=options.seq_len, samples=1)
    result: dict[str, Any] = {
        "what": "smollm2 without its vocabulary head, batch 1, float32: time of a forward as a "
        "ratio to the plain SDPA one, and peak memory above the loaded, once-run model",
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "seq_len": options.seq_len,
        "rounds": options.rounds,
        "rows_apart_frac": agreement(loaded, text),
        "times": times(loaded, text, modes, options.rounds),
    }
    del loaded
    seq_lens = [int(part) for part in options.seq_lens.split(",")]
    result["memory"] = memory(in_memory, seq_lens, options.threads)
    result["exponents"] = exponents(result["memory"])
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_tables(result)


if __name__ == "__main__":
    main()
