"""Calibration of one ONNX graph: ONNX Runtime's own calibrators and ours, side by side.

SmolLM2's float graph up to the last norm (no vocabulary logits and no cache among its outputs,
which ONNX Runtime's histogram calibrators would keep as well), and the same blocks of `pydoc`, one
at a time. All calibrate the same tensors: the inputs of the linear layers. Each calibrator is a
fresh process: `peak` is its VmHWM, imports included, `before` its resident set once everything is
imported; `seconds` run from the file to the ranges. Ours observes once, and every method chooses
from that; `choose` is what the method adds. Perplexity: W8A8 in quantkit's torch simulation, the
weights the same in every row, on blocks of the same text behind the calibration's. `growth`: all of
them at other numbers of samples, once; who wants more than `--limit-gib` of memory is stopped there
and has no figures. Linux only.

    python benchmarks/calibration.py [--samples 32] [--seq-len 512] [--growth 8,128]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "results" / "calibration.json"
MODEL, TEXT = "smollm2", "pydoc"
RECIPE = "w8a8"
EVAL_BLOCKS, EVAL_LEN = 8, 256
BITS = 8
PERCENTILE = 99.99
"""ONNX Runtime's: it cuts half of the rest at each end, so it is our two-sided 99.995."""
METHODS = ("minmax", "two-sided-percentile:99.995", "upper-percentile", "entropy", "mse")
"""Ours, by their names on the command line."""
THEIRS = ("ort minmax", "ort percentile", "ort entropy")
OURS = "quantkit"
TARGET_MEMORY = 5.0
"""How many times our peak ONNX Runtime's Percentile and Entropy were expected to need."""
GRAPH, SETUP, IDS = "prefill.onnx", "setup.json", "ids.npy"
Ranges = dict[str, tuple[float, float]]
Run = Callable[[Path, dict[str, Any], list[dict[str, Any]]], dict[str, Any]]
"""Given the folder, the set-up and the batches, returns ranges and times."""


def prepare(folder: Path, samples: int, seq_len: int, most: int) -> None:
    """Writes the graph, the tokens of `most` blocks, and which tensor each linear layer reads."""
    import numpy as np
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    from quantkit.calib_sets import text_slice
    from quantkit.exporting.float_export import export_float
    from quantkit.exporting.graphs import MODEL_FILE, load_graph
    from quantkit.exporting.linears import match_linears
    from quantkit.models import load
    from quantkit.probes import linear_modules

    loaded = load(MODEL)
    text = text_slice(TEXT, loaded.tokenizer, seq_len=seq_len, samples=samples)
    every = text_slice(TEXT, loaded.tokenizer, seq_len=seq_len, samples=most)
    assert every.sequences == most, f"{TEXT} has {every.sequences} blocks of {seq_len} only"
    np.save(folder / IDS, np.stack([block.numpy() for block in every.ids]))
    path = folder / MODEL_FILE  # there already in a kept folder
    if not path.is_file():
        export_float(loaded.model, folder)
    graph = load_graph(path)
    found = match_linears(graph, dict(linear_modules(loaded.model)))
    modules = {
        each.module: value.name for each in found if (value := each.node.inputs[0]) is not None
    }
    head = [n for n in graph.graph if n.outputs[0].name == "logits"]
    assert len(head) == 1 and head[0].op_type == "MatMul"
    last = head[0].inputs[0]
    assert last is not None
    graph.graph.outputs.clear()
    graph.graph.outputs.append(last)
    RemoveUnusedNodesPass()(graph)
    ir.save(graph, folder / GRAPH)  # its weights stay where they are
    setup = {
        "modules": modules,
        "tensors": list(dict.fromkeys(modules.values())),
        "caches": {
            value.name: [value.shape[1], value.shape[3]]
            for value in graph.graph.inputs
            if value.shape is not None and len(value.shape) == 4
        },
        "data": {"text": TEXT, "sha256": text.sha256, "source_sha256": text.source_sha256},
    }
    (folder / SETUP).write_text(json.dumps(setup), encoding="utf-8")


def _feeds(folder: Path, setup: dict[str, Any], samples: int) -> list[dict[str, Any]]:
    import numpy as np

    ids = np.load(folder / IDS)[:samples]
    caches = {
        name: np.zeros((1, heads, 0, width), np.float32)
        for name, (heads, width) in setup["caches"].items()
    }
    mask = np.ones((1, ids.shape[1]), np.int64)
    return [{"input_ids": row[None], "attention_mask": mask, **caches} for row in ids]


def _theirs(name: str) -> Run:
    """Returns a run of one of ONNX Runtime's calibrators, limited to the given tensors."""
    from onnxruntime.quantization import calibrate

    kind, options = {
        "ort minmax": (calibrate.MinMaxCalibrater, {}),
        "ort percentile": (calibrate.PercentileCalibrater, {"percentile": PERCENTILE}),
        "ort entropy": (calibrate.EntropyCalibrater, {}),
    }[name]

    class Reader(calibrate.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: list[dict[str, Any]]) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    def run(folder: Path, setup: dict[str, Any], feeds: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = set(setup["tensors"])

        class Chosen(kind):  # type: ignore[misc,valid-type]
            def select_tensors_to_calibrate(self, model: Any) -> Any:
                tensors, infos = super().select_tensors_to_calibrate(model)
                assert wanted <= tensors, sorted(wanted - tensors)
                return [t for t in setup["tensors"] if t in tensors], infos

        with tempfile.TemporaryDirectory() as aside:
            started = time.perf_counter()
            calibrator = Chosen(
                folder / GRAPH,
                op_types_to_calibrate=["MatMul"],
                augmented_model_path=str(Path(aside) / "augmented.onnx"),
                **options,
            )
            calibrator.augment_graph()
            calibrator.create_inference_session()
            calibrator.collect_data(Reader(feeds))
            found = calibrator.compute_data()
            ranges = {
                tensor: tuple(bound.item() for bound in found[tensor].range_value)
                for tensor in setup["tensors"]
            }
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "ranges": {name: ranges}, "choose_s": {}}

    return run


def _ours(folder: Path, setup: dict[str, Any], feeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one pass over the batches, and the ranges that each method chooses from it."""
    from quantkit.onnx_runtime import GraphBatch, observe_graph

    methods = _methods()
    batches = [GraphBatch(feeds=each) for each in feeds]
    started = time.perf_counter()
    seen = observe_graph(folder / GRAPH, batches, tensors=setup["tensors"])
    seconds = time.perf_counter() - started
    ranges, choose_s = {}, {}
    for name, choose in methods.items():
        started = time.perf_counter()
        ranges[f"{OURS} {name}"] = {tensor: choose(bundle) for tensor, bundle in seen.items()}
        choose_s[f"{OURS} {name}"] = time.perf_counter() - started
    return {"seconds": seconds, "ranges": ranges, "choose_s": choose_s}


def _methods() -> dict[str, Callable[[Any], tuple[float, float]]]:
    """Returns what chooses a range from a bundle, by name."""
    from quantkit.numerics.choose import choose_range
    from quantkit.numerics.methods import Method, parse_method

    def chooser(method: Method) -> Callable[[Any], tuple[float, float]]:
        def choose(bundle: Any) -> tuple[float, float]:
            lo, hi = choose_range(method, bundle, BITS, symmetric=False)
            return float(lo), float(hi)

        return choose

    return {name: chooser(parse_method(name)) for name in METHODS}


def _warm_up() -> None:
    """Imports everything, and has the compiled pass ready: it is built once a machine."""
    import quantkit.onnx_runtime  # noqa: F401
    from quantkit.numerics.scan import warm_up

    _methods()
    warm_up()


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def calibrated(name: str, folder: Path, samples: int) -> dict[str, Any]:
    """Returns one calibrator's ranges, time and peak memory, measured in this process."""
    setup = json.loads((folder / SETUP).read_text(encoding="utf-8"))
    feeds = _feeds(folder, setup, samples)
    if name == OURS:
        _warm_up()
    run: Run = _ours if name == OURS else _theirs(name)
    before = _status_mib("VmRSS")
    found = run(folder, setup, feeds)
    return found | {"before_mib": before, "peak_mib": _status_mib("VmHWM")}


def perplexities(folder: Path, samples: int, seq_len: int, names: list[str]) -> dict[str, Any]:
    """Returns the perplexity of the float model and of each set of ranges at W8A8."""
    import torch

    from quantkit.calib_sets import TokenBatch, text_slice
    from quantkit.models import load
    from quantkit.quantization import fake_quantized
    from quantkit.recipe import Recipe
    from quantkit.results import Range
    from quantkit.tasks.perplexity import score_blocks

    setup = json.loads((folder / SETUP).read_text(encoding="utf-8"))
    loaded = load(MODEL)
    skip = math.ceil(samples * seq_len / (EVAL_LEN - 1)) + 1  # whole blocks, behind the other part
    text = text_slice(TEXT, loaded.tokenizer, seq_len=EVAL_LEN, samples=EVAL_BLOCKS, skip=skip)

    def score(batch: TokenBatch) -> torch.Tensor:
        logits: torch.Tensor = loaded.model(**batch.inputs, use_cache=False).logits
        return logits

    result = {"float": score_blocks(score, text).perplexity}
    for name in names:
        ranges: Ranges = json.loads(_ranges_file(folder, name).read_text(encoding="utf-8"))
        known = {
            f"linear_input/{module}": Range(
                lo=ranges[tensor][0],
                hi=ranges[tensor][1],
                method=name,
                granularity="tensor",
                count=1,
                point="linear_input",
            )
            for module, tensor in setup["modules"].items()
        }
        with fake_quantized(loaded.model, Recipe.parse(RECIPE), known):
            result[name] = score_blocks(score, text).perplexity
    return {"sha256": text.sha256, "skipped_blocks": skip, "perplexity": result}


def _ranges_file(folder: Path, name: str) -> Path:
    return folder / f"ranges {name}.json"


def _child(folder: Path, *arguments: str, limit_gib: float | None = None) -> Any:
    """Returns what a process of its own writes to its answer file.

    Args:
        limit_gib: What it may take of memory of its own; then None where it wants more.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", str(folder), *arguments]
    # torch's threads give way while they wait, so that a busy machine is slow and not stuck
    surroundings = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    if limit_gib is None:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=surroundings)
        return json.loads(answer.read_text(encoding="utf-8"))
    most = str(int(limit_gib * 2**20))  # KiB
    limited = ["bash", "-c", 'ulimit -d "$0" && exec "$@"', most, *command]
    done = subprocess.run(
        limited,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        is_memory = any(word in last for word in ("alloc", "Memory", "memory"))
        assert is_memory, f"{arguments} failed: {last}"
        return None
    return json.loads(answer.read_text(encoding="utf-8"))


def _run_child(folder: Path, what: str, arguments: list[str]) -> None:
    answer: Any = {}
    if what == "prepare":
        prepare(folder, *map(int, arguments))
    elif what == "calibrate":
        answer = calibrated(arguments[0], folder, int(arguments[1]))
    else:
        answer = perplexities(folder, int(arguments[0]), int(arguments[1]), arguments[2:])
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def compared(ranges: dict[str, Ranges]) -> dict[str, dict[str, Any]]:
    """Returns how each calibrator's ranges stand to min-max's, our own."""
    reference = ranges[f"{OURS} minmax"]
    found = {}
    for name, its in ranges.items():
        shares = [(its[t][1] - its[t][0]) / (reference[t][1] - reference[t][0]) for t in reference]
        found[name] = {
            "equal_to_minmax": sum(tuple(its[t]) == tuple(reference[t]) for t in reference),
            "of": len(reference),
            "width_of_minmax_median": round(statistics.median(shares), 4),
            "width_of_minmax_min": round(min(shares), 4),
            "sha256": hashlib.sha256(json.dumps(its, sort_keys=True).encode()).hexdigest()[:16],
        }
    return found


def _measured(
    folder: Path, name: str, samples: int, limit_gib: float | None = None
) -> dict[str, Any] | None:
    point: dict[str, Any] | None = _child(
        folder, "calibrate", name, str(samples), limit_gib=limit_gib
    )
    if point is None:
        print(
            f"{name}, {samples} samples: more than {limit_gib:g} GiB", file=sys.stderr, flush=True
        )
        return None
    print(
        f"{name}, {samples} samples: {point['seconds']:.1f} s, {point['peak_mib']:.0f} MiB",
        file=sys.stderr,
        flush=True,
    )
    return point


def _point(name: str, samples: int, point: dict[str, Any] | None) -> dict[str, Any]:
    if point is None:
        return {"calibrator": name, "samples": samples, "seconds": None, "peak_mib": None}
    return {
        "calibrator": name,
        "samples": samples,
        "seconds": round(point["seconds"], 2),
        "before_mib": round(point["before_mib"], 1),
        "peak_mib": round(point["peak_mib"], 1),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns every figure; each calibrator's ranges are left in the folder."""
    import onnxruntime

    samples, seq_len = options.samples, options.seq_len
    load = round(os.getloadavg()[0], 2)
    _child(folder, "prepare", str(samples), str(seq_len), str(max(samples, *options.growth)))
    setup = json.loads((folder / SETUP).read_text(encoding="utf-8"))
    points: list[dict[str, Any]] = []
    ranges: dict[str, Ranges] = {}
    choose_s: dict[str, float] = {}
    rounds = [
        {name: _measured(folder, name, samples) for name in (OURS, *THEIRS)}
        for _ in range(options.rounds)
    ]
    for name in (OURS, *THEIRS):
        point = min((each[name] for each in rounds), key=lambda found: float(found["seconds"]))
        points.append(_point(name, samples, point))
        ranges |= point["ranges"]
        choose_s |= {each: round(value, 3) for each, value in point["choose_s"].items()}
    growth = [
        _point(name, count, _measured(folder, name, count, options.limit_gib))
        for count in options.growth
        for name in (OURS, *THEIRS)
    ]
    for name, found in ranges.items():
        _ranges_file(folder, name).write_text(json.dumps(found), encoding="utf-8")
    scored = _child(folder, "perplexity", str(samples), str(seq_len), *ranges)
    ours = points[0]
    return {
        "what": (
            f"{MODEL}'s prefill graph, {samples} x {seq_len} tokens of {TEXT}, batch 1, "
            f"{len(setup['tensors'])} tensors; MiB are VmHWM of a fresh process"
        ),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "cpus": os.cpu_count(),
        "load_before": load,
        "rounds": options.rounds,
        "samples": samples,
        "seq_len": seq_len,
        "seed": None,  # nothing is drawn: the first blocks of a text
        "data": setup["data"],
        "evaluation": {
            "blocks": EVAL_BLOCKS,
            "seq_len": EVAL_LEN,
            "skipped_blocks": scored["skipped_blocks"],
            "sha256": scored["sha256"],
        },
        "calibrators": points,
        "choose_s": choose_s,
        "ratios": {
            point["calibrator"]: {
                "memory": round(point["peak_mib"] / ours["peak_mib"], 2),
                "seconds": round(point["seconds"] / ours["seconds"], 2),
            }
            for point in points[1:]
        },
        "target_memory_ratio": TARGET_MEMORY,
        "limit_gib": options.limit_gib,
        "growth": growth,
        "ranges": compared(ranges),
        "recipe": RECIPE,
        "perplexity": {name: round(value, 3) for name, value in scored["perplexity"].items()},
    }


def _print_tables(result: dict[str, Any]) -> None:
    print(f"{'calibrator':<16} {'samples':>7} {'s':>7} {'peak MiB':>9} {'x ours':>7}")
    for point in result["calibrators"] + result["growth"]:
        ratio = result["ratios"].get(point["calibrator"], {}).get("memory", "")
        if point["samples"] != result["samples"]:
            ratio = ""
        if point["seconds"] is None:
            print(f"{point['calibrator']:<16} {point['samples']:>7} more than the limit")
            continue
        print(
            f"{point['calibrator']:<16} {point['samples']:>7} {point['seconds']:>7.1f} "
            f"{point['peak_mib']:>9.0f} {ratio:>7}"
        )
    print(f"{'ranges':<28} {'= min-max':>10} {'width':>6} {RECIPE + ' perplexity':>16}")
    print(f"{'float':<28} {'':>10} {'':>6} {result['perplexity']['float']:>16.2f}")
    for name, its in result["ranges"].items():
        print(
            f"{name:<28} {its['equal_to_minmax']:>6}/{its['of']} "
            f"{its['width_of_minmax_median']:>6.2f} {result['perplexity'][name]:>16.2f}"
        )


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measures, writes the file, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--growth", type=_whole_numbers, default=[8, 128], help="sample counts")
    parser.add_argument("--limit-gib", type=float, default=12.0, help="of each run of --growth")
    parser.add_argument("--rounds", type=int, default=1, help="in turns; the fastest counts")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, help="keep graph and ranges here")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, what, *arguments = options.child
        _run_child(Path(folder), what, arguments)
        return
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or Path(aside)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(folder, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_tables(result)


if __name__ == "__main__":
    main()
