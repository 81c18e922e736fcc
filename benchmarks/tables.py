"""Tables of `benchmarks/results`, as the README and `reports/benchmarks` show them.

Each function takes what `results` reads and returns Markdown. A test holds the README against
`quoted`, so that a figure in a table there can only be one that stands in a file here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHOWN_METHODS = ("minmax", "mse", "entropy")
Results = Mapping[str, Any]


def results(name: str) -> Results:
    """Returns what a benchmark wrote."""
    found: Results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table without a line's end behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines
    )


def perplexity(value: float) -> str:
    """Returns two decimals, none above a thousand, and a power of ten where nothing is left."""
    if value >= 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def gigabytes(mebibytes: float) -> str:
    """Returns `1.2 GiB`."""
    return f"{mebibytes / 1024:.1f} GiB"


def recording(found: Results) -> str:
    """Returns what `stats` costs beside the model's plain forward."""
    modes = {
        "extremes": "max, min and top-k of every row (`--rows 0`)",
        "all rows": "every statistic of every row",
        "rows 512": "every statistic, `--rows 512`",
        "eager": "`output_attentions=True`, eager, statistics not included",
    }
    lengths = sorted({point["seq_len"] for point in found["times"]})
    rows = []
    for mode, words in modes.items():
        row = [words]
        for length in lengths:
            ratio = one(found["times"], mode=mode, seq_len=length)
            extra = one(found["memory"], mode=mode, seq_len=length, samples=1)
            known = ratio is not None and extra is not None
            row.append(
                f"{ratio['ratio']:.1f}x, {extra['extra_mib']:,.0f} MiB" if known else "not tried"
            )
        rows.append(row)
    return markdown(["", *(f"{length:,} tokens" for length in lengths)], rows)


def ranges(found: Results) -> str:
    """Returns the perplexity of W8A8 by the method that chose its ranges, the best first."""
    rows = sorted(found["methods"], key=lambda row: float(row["perplexity"]))
    return markdown(
        ["ranges", "perplexity", "95 %"],
        [
            [
                "float" if row["recipe"] == "none" else f"`{row['ranges']}`",
                perplexity(row["perplexity"]),
                f"{perplexity(row['ci_low'])} to {perplexity(row['ci_high'])}",
            ]
            for row in rows
        ],
    )


def calibration(found: Results) -> str:
    """Returns seconds and peak memory of the calibrators, and what their ranges are worth."""
    ours = {
        name.removeprefix("quantkit "): value
        for name, value in found["perplexity"].items()
        if name.startswith("quantkit ")
    }
    counts = sorted({point["samples"] for point in found["calibrators"] + found["growth"]})
    rows = []
    for point in found["calibrators"]:
        name = point["calibrator"]
        worth = found["perplexity"].get(name)
        named = name.replace("ort ", "onnxruntime ")
        rows.append(
            [
                f"{named}, one pass" if worth is None else named,
                *(_calibrated(found, name, count) for count in counts),
                ", ".join(f"{key} {perplexity(ours[key])}" for key in SHOWN_METHODS)
                if worth is None
                else perplexity(worth),
            ]
        )
    return markdown(["", *(f"{n} samples" for n in counts), "perplexity"], rows)


def _calibrated(found: Results, name: str, count: int) -> str:
    point = one(found["calibrators"] + found["growth"], calibrator=name, samples=count)
    if point is None:
        return "not tried"
    if point["seconds"] is None:
        return f"more than {found['limit_gib']:g} GiB"
    return f"{point['seconds']:.0f} s, {gigabytes(point['peak_mib'])}"


def logits(found: Results) -> str:
    """Returns the time and memory of a forward that is quantized as it runs."""
    modes = {
        "plain": "plain SDPA",
        "logits4": "`logits4`",
        "logits4:head": "`logits4:head`",
        "logits4:row": "`logits4:row`",
        "logits4:head:static": "`logits4:head:static`",
        "qk8": "`qk8`",
        "probs8": "`probs8`",
        "kv8": "`kv8`",
        "logits4+probs8:head": "`logits4+probs8:head`",
        "eager tensor": "the eager way, per tensor",
        "eager head": "the eager way, per head",
        "eager row": "the eager way, per row",
    }
    longest = max(point["seq_len"] for point in found["memory"])
    rows = []
    for mode, words in modes.items():
        time = one(found["times"], mode=mode)
        memory = one(found["memory"], mode=mode, seq_len=longest)
        slope = one(found["exponents"], mode=mode)
        if time is not None:
            rows.append(
                [
                    words,
                    f"{time['median_ratio']:.1f}x",
                    "" if memory is None else f"{memory['growth_mib']:,.0f} MiB",
                    "" if slope is None else f"length^{slope['growth']:.1f}",
                ]
            )
    return markdown(["", "time", f"memory, {longest:,} tokens", "grows as"], rows)


def exports(found: Results) -> str:
    """Returns what each tool's graph of one model is worth and costs."""
    rows = []
    for graph in found["graphs"]:
        is_float = graph["graph"] == "float32"
        span = f" ({graph['ratio_low']:.3f} to {graph['ratio_high']:.3f})"
        beside = "1" if is_float else f"{graph['ratio']:.3f}{span}"
        rows.append(
            [
                f"**{graph['graph']}**"
                if graph["graph"].startswith("quantkit")
                else graph["graph"],
                perplexity(graph["perplexity"]),
                beside if graph["perplexity"] < 1e6 else "ruined",
                f"{graph['prefill_speed']:.2f}x",
                f"{graph['decode_speed']:.2f}x",
                f"{graph['bytes'] / 1e6:.0f} MB",
                f"{graph['memory_bytes'] / 1e6:.0f} MB",
            ]
        )
    return markdown(
        ["", "perplexity", "beside float, 95 %", "prefill", "decode", "size", "memory"], rows
    )


def growth(found: Results) -> str:
    """Returns the fitted exponents of time and memory, a command a row."""
    axes = {"samples": "samples", "seq_len": "length", "layers": "layers"}
    commands = list(dict.fromkeys(fit["command"] for fit in found["fits"]))
    rows = []
    for command in commands:
        row = [f"`{command}`"]
        for axis in axes:
            fit = one(found["fits"], command=command, axis=axis)
            row.append("" if fit is None else _exponent(fit))
        rows.append(row)
    return markdown(["time; memory", *axes.values()], rows)


def _exponent(fit: Mapping[str, Any]) -> str:
    error = "" if fit["standard_error"] is None else f" ± {fit['standard_error']:.2f}"
    memory = fit["memory_exponent"]
    return f"{fit['exponent']:.2f}{error}; {'flat' if memory is None else f'{memory:.2f}'}"


def memory(found: Results) -> str:
    """Returns how far each command's memory rises, by samples and length."""
    return markdown(
        ["", "samples", "tokens a sample", "memory"],
        [
            [
                f"`{point['command']}`",
                f"{point['samples']:,}",
                f"{point['seq_len']:,}",
                f"{point['growth_mib']:,.0f} MiB",
            ]
            for point in found["points"]
        ],
    )


def monitor(found: Results) -> str:
    """Returns what the monitor adds to a training step's processor time."""
    return markdown(
        ["", "parameters", "a recorded step", f"every {found['every']}th recorded"],
        [
            [
                model["model"],
                f"{model['parameters']:,}",
                f"{model['processor']['recorded_step_ratio']:.3f}x",
                f"{model['processor']['expected_ratio']:.4f}x",
            ]
            for model in found["models"]
        ],
    )


def pair_logits(found: Results) -> str:
    """Returns in how many items graph and simulation choose the same, and their perplexities."""
    return markdown(
        ["", "recipe", "same choice", "perplexity, graph and simulation"],
        [
            [
                row["model"],
                f"`{row['recipe']}`",
                f"{row['items_agreed']} of {row['items']}",
                ", ".join(f"{value:.2f}" for value in row["perplexity"]),
            ]
            for row in found["rows"]
        ],
    )


def one(points: Sequence[Mapping[str, Any]], **wanted: object) -> Mapping[str, Any] | None:
    """Returns the point with these values; None without."""
    return next((p for p in points if all(p.get(k) == v for k, v in wanted.items())), None)


README_TABLES: Mapping[str, Callable[[Results], str]] = {
    "recording": recording,
    "ranges": ranges,
    "calibration": calibration,
    "logits": logits,
    "export_peers": exports,
    "growth": growth,
}
"""By the name of the results: the table that the README quotes."""

PAGE_TABLES: Mapping[str, Callable[[Results], str]] = {
    **README_TABLES,
    "memory": memory,
    "monitor": monitor,
    "pair_logits": pair_logits,
}
"""By the name of the results: the table of the page."""


MARK = re.compile(r"(<!-- benchmark: (\w+) -->\n\n)(?:\|.*\n)*")
"""In front of each quoted table; what a page shows does not have it."""


def quoted(text: str) -> str:
    """Returns the text with the table behind each mark as the results have it now."""
    return MARK.sub(lambda m: f"{m[1]}{README_TABLES[m[2]](results(m[2]))}\n", text)
