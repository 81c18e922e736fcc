"""What quantized ONNX graphs of SmolLM2 are worth and cost: quantkit's beside those of other tools.

One float graph, one text, one process. Every tool makes its graph from the same float graph (but
for transformers' exporter, which traces the model again) in a process of its own, NNCF in a virtual
environment of its own; tools that calibrate are given the same first blocks of `--calib`. Options
are those that each tool's documentation recommends for a transformer: see `benchmarks/peers/`.
What is there already with the same inputs is not made again; a tool that fails has a row that says
how.

* Perplexity: of `--blocks` blocks of `--text` after the first `--skip`, in ONNX Runtime, and its
  ratio to the float graph's with a 95 % interval of paired resampled blocks. The blocks must have
  taken part in nothing: those that any JSON file of a folder of `--ours` names are refused.
* Time: all graphs are open at once and take turns, `--repeats` times; medians, of a prompt of
  `--tokens` and of one token behind `--cached` others, and how many times as fast as float.
* Memory: peak of a fresh process that loads the graph and runs the prompt.

    python benchmarks/export_peers.py [--ours DIR ...] [--float DIR] [--peers NAME,...] [--quick]

`--ours`: folders of `quantkit export`. `--quick` is a run to see that it works: few blocks, nothing
written but the graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from peers.making import PEERS, files_of, made_by

from quantkit import __version__
from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.errors import QuantkitError
from quantkit.exporting import (
    MODEL_FILE,
    BlockScores,
    block_scores,
    change_of,
    export_float,
    latency,
    load_graph,
    memory,
    perplexity_of,
)
from quantkit.exporting.proof import SMOOTHING_KEY
from quantkit.models import LoadedModel, load
from quantkit.onnx_runtime import DecoderSession, decoder_layout, open_decoder
from quantkit.results import Export
from quantkit.results.environment import environment
from quantkit.results.io import read_json, read_plain, write_json

HERE = Path(__file__).parent
OUT = HERE / "results" / "export_peers.json"
WORK = HERE / "data" / "peers"
MODEL, TEXT = "smollm2", "pydoc"
SEQ_LEN = 256
BATCH_SIZE = 4
CALIB_BLOCKS = 8
FLOAT = "float32"
QUIET = 3


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph to measure, and what its row says about where it comes from."""

    label: str
    folder: Path
    says: Mapping[str, Any]
    ours: bool = False

    @property
    def path(self) -> Path:
        """The file itself."""
        return self.folder / MODEL_FILE

    def open(self, threads: int) -> DecoderSession:
        """Returns a session as the users of each have it: plain, ours as quantkit opens it."""
        if self.ours:
            return open_decoder(self.path, threads=threads)
        options = ort.SessionOptions()
        options.log_severity_level = QUIET
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        return DecoderSession(session=session, layout=decoder_layout(session))


def ours(folders: Sequence[Path], text: TokenSlice) -> list[Graph]:
    """Returns quantkit's graphs; what they were made with must not be what they are measured on."""
    found = []
    for folder in folders:
        for file in sorted(folder.glob("**/*.json")):
            for data in _slices(read_plain(file)):
                _require_unseen(data, text, file)
        export = read_json(folder / "export.json", Export)
        kept = f", {len(export.kept)} in float" if export.kept else ""
        says = {
            "recipe": export.recipe,
            "storage": export.storage,
            "opset": export.opset,
            "domains": export.domains,
            "kept": export.kept,
            "smoothed": export.smoothed,
            "passed": export.passed,
            "files": files_of(folder),
        }
        label = f"quantkit {export.recipe}{kept} ({folder.name})"
        found.append(Graph(label=label, folder=folder, says=says, ours=True))
    return found


def _slices(plain: object) -> Iterator[dict[str, Any]]:
    """Yields all that a result file says about slices of data."""
    if isinstance(plain, dict):
        if {"source", "skipped_blocks", "sequences", "block_hashes"} <= plain.keys():
            yield plain
        plain = list(plain.values())
    for part in plain if isinstance(plain, list) else ():
        yield from _slices(part)


def _require_unseen(data: Mapping[str, Any], text: TokenSlice, file: Path) -> None:
    """Raises SystemExit where the blocks, or their stretch of the same text, were used."""
    begin = data["skipped_blocks"] * data["seq_len"]
    end = begin + data["sequences"] * data["seq_len"]
    first = text.skip * text.seq_len
    meets = data["source"] == text.source and begin < first + text.tokens and first < end
    if meets or set(data["block_hashes"]) & set(text.block_hashes):
        raise SystemExit(
            f"{file} names tokens {begin} to {end} of {data['source']}: expected a --skip behind "
            f"them, got {text.skip} blocks of {text.seq_len} tokens."
        )


def measured(
    graphs: Sequence[Graph], text: TokenSlice, options: Any
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns a row a graph that runs, and how the others failed; the float graph is the first."""
    stream = torch.cat(text.ids)[None]
    prompt, behind = stream[:, : options.tokens], stream[:, : options.cached + 1]
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    base: BlockScores | None = None
    for graph in graphs:
        print(f"scoring {graph.label}", file=sys.stderr, flush=True)
        try:
            scores = block_scores(graph.open(options.threads), text.batches(BATCH_SIZE))
        except Exception as error:  # ONNX Runtime's own classes share no base but Exception
            failed[graph.label] = str(error).strip().splitlines()[0]
            continue
        if not np.isfinite(scores[0]).all():
            failed[graph.label] = "its perplexity is no finite number"
            continue
        base = base or scores
        ratio, low, high = change_of(base, scores, options.seed)
        rows.append(
            {
                "graph": graph.label,
                **graph.says,
                "perplexity": perplexity_of(scores),
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "bytes": sum(file.stat().st_size for file in graph.folder.glob(f"{MODEL_FILE}*")),
                "memory_bytes": memory(graph.path, prompt),
            }
        )
    print("timing", file=sys.stderr, flush=True)
    sessions = {
        graph.label: graph.open(options.threads) for graph in graphs if graph.label not in failed
    }
    for kind, ids, cached in (("prefill", prompt, 0), ("decode", behind, options.cached)):
        found = latency(sessions, ids, cached=cached, repeats=options.repeats)
        for row in rows:
            row[f"{kind}_ms"] = found[row["graph"]]
            row[f"{kind}_speed"] = found[graphs[0].label] / found[row["graph"]]
    return rows, failed


def print_table(rows: Sequence[dict[str, Any]], failed: Mapping[str, str]) -> None:
    """Prints the rows as Markdown, and below them what failed."""
    heads = "perplexity", "/ float", "95 %", "prefill ms", "speed", "decode ms", "speed", "MB"
    print(f"| graph | {' | '.join(heads)} | memory MB |")
    print(f"|---|{'--:|' * (len(heads) + 1)}")
    for row in rows:
        low, high = row["ratio_low"], row["ratio_high"]
        between = "" if low is None else f"{low:.3f} to {high:.3f}"
        held = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:,.0f}"
        print(
            f"| {row['graph']} | {row['perplexity']:,.2f} | {row['ratio']:.3f} | {between} | "
            f"{row['prefill_ms']:,.0f} | {row['prefill_speed']:.2f} | {row['decode_ms']:,.1f} | "
            f"{row['decode_speed']:.2f} | {row['bytes'] / 1e6:,.0f} | {held} |"
        )
    for label, error in failed.items():
        print(f"\n{label} failed: {error}")


def compared(names: Sequence[str], options: Any) -> dict[str, Any]:
    """Returns the whole result."""
    loaded = load(MODEL)
    text = slice_of(loaded, options.text, blocks=options.blocks, skip=options.skip)
    if text.tokens < max(options.tokens, options.cached + 1):
        raise SystemExit(
            f"--tokens and --cached take at most the {text.tokens} tokens of the text."
        )
    calibration = slice_of(loaded, options.calib, blocks=CALIB_BLOCKS)
    require_disjoint(calibration, text, "calibration and evaluation")
    own = ours(options.ours, text)
    float_path = (options.float or options.work / FLOAT) / MODEL_FILE
    if not float_path.is_file():
        print("exporting the float graph", file=sys.stderr, flush=True)
        export_float(loaded.model, float_path.parent)
    if SMOOTHING_KEY in load_graph(float_path).metadata_props:
        raise SystemExit(
            f"{float_path} is of a smoothed model: expected the float graph as it was."
        )
    model = loaded.info()
    del loaded
    calib = options.work / "calibration.npy"
    options.work.mkdir(parents=True, exist_ok=True)
    np.save(calib, torch.stack(calibration.ids).numpy())
    float_files = files_of(float_path.parent)
    nncf_venv = options.nncf_venv or options.work / "venv-nncf"
    found, errors = made_by(names, options.work, float_path, float_files, calib, nncf_venv)
    failed = {PEERS[name].label: error for name, error in errors.items()}
    graphs = [
        Graph(label=PEERS[name].label, folder=options.work / name, says=says)
        for name, says in found.items()
    ]
    base = Graph(label=FLOAT, folder=float_path.parent, says={"files": float_files}, ours=True)
    rows, refused = measured([base, *graphs, *own], text, options)
    return {
        "what": "perplexity, milliseconds and memory of ONNX graphs of one model, by who quantized "
        "it; ONNX Runtime on the CPU, batch 1 in time, ratios to the float graph",
        "environment": environment() | {"quantkit": __version__},
        "threads": options.threads,
        "seed": options.seed,
        "repeats": options.repeats,
        "prefill_tokens": options.tokens,
        "decode_cached": options.cached,
        "model": model,
        "evaluation": text.info(BATCH_SIZE),
        "calibration": calibration.info(1),
        "graphs": rows,
        "failed": failed | refused,
    }


def slice_of(loaded: LoadedModel, source: str, *, blocks: int, skip: int = 0) -> TokenSlice:
    """Returns blocks of a text."""
    found = text_slice(source, loaded.tokenizer, seq_len=SEQ_LEN, samples=blocks, skip=skip)
    if found.sequences < blocks or found.tokens < blocks * SEQ_LEN:
        raise SystemExit(
            f"{source} is too short: expected {blocks} blocks of {SEQ_LEN} tokens after {skip}, "
            f"got {found.sequences}."
        )
    return found


def main() -> None:
    """Makes what is missing, measures, writes the file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path, nargs="*", default=[])
    parser.add_argument("--float", type=Path, help="folder of a float graph; default: exported")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--skip", type=int, default=377)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--calib", default=TEXT)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cached", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--nncf-venv", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.repeats = 2, 2
    names = [name for name in options.peers.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    try:
        result = compared(names, options)
    except QuantkitError as error:
        parser.error(str(error))
    if not options.quick:
        write_json(options.out, result)
    print_table(result["graphs"], result["failed"])


if __name__ == "__main__":
    main()
