"""What `fuzz.py` feeds: every parser of quantkit, undamaged examples, and what must hold after.

A target's `use` returns where the value that was read round-trips, raises InputError where the
input is refused, and anything else is a failure.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import gguf
import numpy as np
import torch
import typer
from typer.main import get_command

from quantkit.calib_sets.documents import documents_at
from quantkit.calib_sets.manifest import manifest_text, read_manifest
from quantkit.calib_sets.numpy_files import read_arrays
from quantkit.calib_sets.source import Source
from quantkit.calib_sets.token_files import read_tokens
from quantkit.calib_sets.toml_text import toml_text
from quantkit.calibration import recording
from quantkit.calibration.observation import Observation
from quantkit.calibration.tensor_file import read_tensors, write_tensors
from quantkit.cli import app
from quantkit.cli.config import read_config
from quantkit.cli.words import fractions, share, whole_numbers, words
from quantkit.jobs.config_file import CONFIG_SCHEMA
from quantkit.jobs.formats import ExportFormat
from quantkit.jobs.pair import PairSpec
from quantkit.jobs.tasks import parse_task
from quantkit.models.gguf_check import check_gguf
from quantkit.numerics.granularity import logit_granularity, weight_granularity
from quantkit.numerics.methods import parse_method, parse_methods
from quantkit.numerics.observers import Bundle, MovingAverage
from quantkit.numerics.qtypes import QType
from quantkit.recipe import Recipe
from quantkit.reporting.report import page_of, render_markdown
from quantkit.results import (
    AutoResult,
    Calibration,
    Diagnosis,
    Export,
    Plan,
    Ranges,
    Sensitivity,
    Stats,
    Sweep,
    TrainingResult,
    read_curves,
    read_json,
)
from quantkit.results.io import dumps, to_plain
from quantkit.search.cells import CELLS_SCHEMA, Cells
from quantkit.tasks.choice_items import read_items

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "results" / "fixtures"
PAIR = ROOT / "quantkit" / "models" / "pair"
REPORT = ROOT / "reports" / "pair"
POINTS = ("attention_logit", "linear_input", "hidden_state")
HASH = "0123456789abcdef" * 4
RESULTS: dict[str, tuple[type, tuple[Path, ...]]] = {
    "stats": (Stats, (FIXTURES / "v1/base/stats.json", FIXTURES / "v4/base/stats.json")),
    "ranges": (Ranges, (FIXTURES / "v1/base/ranges.json", FIXTURES / "v3/base/ranges.json")),
    "calibration": (Calibration, (FIXTURES / "v3/base/calibration.json",)),
    "sensitivity": (Sensitivity, (FIXTURES / "v3/base/sensitivity.json",)),
    "sweep": (Sweep, (FIXTURES / "v2/sweep.json", FIXTURES / "v4/sweep.json")),
    "export": (Export, (FIXTURES / "v1/base/export.json", REPORT / "diff/export.json")),
    "training": (TrainingResult, (PAIR / "training.json",)),
    "auto": (AutoResult, (ROOT / "benchmarks" / "results" / "auto_smollm2.json",)),
    "diagnosis": (Diagnosis, ()),
    "plan": (Plan, ()),
}
"""Kind of a result -> its class, and files of old and new versions; others are made up."""
_MANIFEST = f"""schema = "quantkit.calib/1"
name = "mine"
kind = "text"
description = "Words, \\"quoted\\"."
licence = "CC0-1.0"
cut = "documents"
seed = 3
samples = 2
drawn = true
bytes = 10
sha256 = "{HASH}"

[source]
type = "path"
names = ["../a b.txt", "sub/\u00e9.txt"]

[files]
"../a b.txt" = "{HASH}"
"""
_CONFIG = f"""schema = "{CONFIG_SCHEMA}"
command = "stats"
model = ["./my-model"]
seq-len = 256
samples = 8
calib = "pydoc"
"""
_KEY = {"model": "0", "text": "1"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser.

    Attributes:
        stage: Which command's input it reads.
        damage: The kind of damage that `fuzz_damage` does to its seeds.
        cost: Of a case that takes long, how many times fewer there are.
    """

    name: str
    stage: str
    damage: str
    seeds: tuple[bytes, ...]
    use: Callable[[bytes, Path], None]
    cost: int = 1


def targets() -> Iterator[Target]:
    """Yields every parser."""
    yield from _option_words()
    yield from _files()
    for name, (cls, paths) in RESULTS.items():
        seeds = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if cls is not AutoResult:  # one of its trials is named elsewhere in it
            seeds = [_short(seed) for seed in seeds]
        seeds = seeds or [example(cls)]
        yield Target(
            name=f"{name}.json",
            stage=_STAGES.get(name, name),
            damage="json",
            seeds=tuple(json.dumps(seed).encode() for seed in seeds),
            use=partial(_result, cls, f"{name}.json"),
        )
        if name != "plan":  # it is printed, and on no page
            yield Target(
                name=f"page of {name}.json",
                stage="report",
                damage="values",
                seeds=(json.dumps(seeds[-1]).encode(),),
                use=partial(_page, f"{name}.json"),
                cost=30 if name in ("stats", "training", "auto") else 10,
            )


_STAGES = {"ranges": "calibrate", "calibration": "calibrate", "training": "train",
           "diagnosis": "diagnose", "plan": "compare"}  # fmt: skip


def _option_words() -> Iterator[Target]:
    def of(name: str, stage: str, parse: Callable[[str], Any], *seeds: str) -> Target:
        def use(data: bytes, _: Path) -> None:
            text = data.decode("utf-8", "surrogateescape")
            found = parse(text)
            printed = getattr(type(found), "__str__", object.__str__) is not object.__str__
            if printed and dataclasses.is_dataclass(found) and type(found) is not ExportFormat:
                again = parse(str(found))
                assert again == found, f"{found!r} is printed as {str(found)!r}, read as {again!r}"

        data = tuple(seed.encode() for seed in seeds)
        return Target(name=name, stage=stage, damage="words", seeds=data, use=use)

    yield of(
        "recipe", "sweep", Recipe.parse, "none", "w8a8+logits4:head", "w4a16:group64", "nf4+kv8",
        "qk8:smooth+probs8:dynamic:row", "logits8:head:static:asymmetric", "kv8:static:head",
        "llm-int8:6.0", "w8a8:token:symmetric",
    )  # fmt: skip
    yield of(
        "--quantize", "export", ExportFormat.parse, "8", "16", "auto", "w8a8-dynamic+kv8:static",
        "w4a16", "w8a16-block", "w4:group32+logits8",
    )  # fmt: skip
    yield of(
        "--task", "sweep", parse_task, "perplexity", "needles:needles=6:queries=2:depths=0/0.5/1",
        "icl:shots=16", "multiple-choice=a.jsonl", "multiple-choice", "lm-eval=hellaswag",
        "image-classification=photos/",
    )  # fmt: skip
    yield of("--method", "calibrate", parse_method, "minmax", "mse:64", "upper-percentile:99.9")
    choice = partial(parse_methods, points=POINTS)
    yield of("--method POINT=", "calibrate", choice, "mse,attention_logit=minmax", "entropy")
    yield of("--group", "calibrate", weight_granularity, "channel", "group:32")
    yield of("--granularity", "sweep", logit_granularity, "tensor", "head", "row")
    yield of("integer type", "numerics", QType.parse, "int8", "uint4", "int6n")
    yield of(
        "calibration source", "calib_sets", Source.parse, "prose.txt", "set.jsonl#field", "photos/",
        "module:pydoc_data.topics#topics", "module:ast,argparse", "package:NAME/path/x.jsonl#text",
        "datasets:org/ID:CONFIG/train#text", "generator:retrieval?needles=4&queries=2",
        "stdlib:docstrings",
    )  # fmt: skip
    yield of("list", "cli", partial(words, "layers"), "a,b", "model.layers.*,*.mlp", "a\nb\n")
    yield of("--bits", "sweep", partial(whole_numbers, "bits"), "16,8,6,4", "8")
    yield of("shares", "cli", partial(fractions, "remaining"), "0.99,0.999", "none")
    yield of("share", "cli", partial(share, "until-stable"), "1%", "0.01")


def _files() -> Iterator[Target]:
    def of(
        name: str, stage: str, damage: str, use: Callable[[Path], None], file: str, *seeds: bytes
    ) -> Target:
        def written(data: bytes, folder: Path) -> None:
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            use(path)

        return Target(name=name, stage=stage, damage=damage, seeds=seeds, use=written)

    yield of(
        "manifest.toml", "calib_sets", "toml", _manifest, "mine/manifest.toml", _MANIFEST.encode(),
        (ROOT / "calib/retrieval/manifest.toml").read_bytes().replace(b'"retrieval"', b'"mine"', 1),
    )  # fmt: skip
    rows = [{"text": "one \u2028 word"}, {"text": "two", "id": 2}, {"text": ""}]
    yield of(
        "documents .jsonl", "calib_sets", "lines", _documents, "text.jsonl",
        "\n".join(map(json.dumps, rows)).encode(),
    )  # fmt: skip
    yield of(
        "document .txt", "calib_sets", "bytes", _documents, "text.txt", "é one\r\ntwo".encode()
    )
    yield of(
        "tokens .jsonl", "calib_sets", "lines", _tokens, "ids.jsonl",
        b'{"input_ids": [1, 2, 3]}\n{"input_ids": [0], "more": 1}\n',
    )  # fmt: skip
    arrays = {"input_ids": np.arange(6).reshape(2, 3), "attention_mask": np.ones((2, 3), np.int64)}
    packed, plain = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, **arrays)
    np.save(plain, arrays["input_ids"])
    yield of("tokens .npz", "calib_sets", "bytes", _tokens, "ids.npz", packed.getvalue())
    yield of("array .npy", "calib_sets", "bytes", _arrays, "x.npy", plain.getvalue())
    curves = (FIXTURES / "v1-curves/curves.jsonl").read_bytes()
    yield of("curves.jsonl", "train", "lines", _curves, "curves.jsonl", curves)
    yield of("config.toml", "cli", "toml", _config, "config.toml", _CONFIG.encode())
    yield of("PAIR.toml", "train", "toml", _pair, "pair.toml", (PAIR / "seeds.toml").read_bytes())
    cells = [
        {"schema": CELLS_SCHEMA, **_KEY},
        {"mode": "all", "unit": "", "first_sequence": 0, "kl": [0.5], "tokens": [7]},
    ]
    lines = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in cells).encode()
    yield of("sensitivity.jsonl", "sensitivity", "lines", _cells, "sensitivity.jsonl", lines)
    item = {"ctx": "a", "endings": ["b", "c"], "label": 1}
    yield of(
        "multiple choice .jsonl", "sweep", "lines", lambda path: _items(path), "items.jsonl",
        f"{json.dumps(item)}\n{json.dumps(item)}".encode(),
    )  # fmt: skip
    yield of("model .gguf", "models", "bytes", check_gguf, "m.gguf", _gguf())
    observed = _observed()
    yield of(
        "observations.safetensors", "calibrate", "tensors", _observations, "o.safetensors", observed
    )
    yield of("tensors", "calibrate", "tensors", _tensors, "o.safetensors", observed)


def _result(cls: type, file: str, data: bytes, folder: Path) -> None:
    path = folder / file
    path.write_bytes(data)
    found = read_json(path, cls)
    written = dumps(found)
    path.write_bytes(written.encode())
    assert dumps(read_json(path, cls)) == written, "another value after writing and reading"


def _page(file: str, data: bytes, folder: Path) -> None:
    (folder / file).write_bytes(data)
    render_markdown(page_of([folder]))


def _manifest(path: Path) -> None:
    found = read_manifest(path)
    path.write_text(manifest_text(found), encoding="utf-8")
    assert read_manifest(path) == found


def _documents(path: Path) -> None:
    documents, _ = documents_at(path, path.name)
    for document in documents:
        document.encode()


def _tokens(path: Path) -> None:
    for row in read_tokens(path, path.name):
        torch.tensor(row, dtype=torch.int64)


def _arrays(path: Path) -> None:
    read_arrays(path, path.name, "x")


def _curves(path: Path) -> None:
    found = read_curves(path)
    lines = [json.dumps(to_plain(line), allow_nan=False) for line in (found.header, *found.steps)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert dumps(read_curves(path)) == dumps(found)


def _config(path: Path) -> None:
    group = _commands()
    command = group.commands["stats"]
    top = typer.Context(group, info_name="quantkit")
    context = typer.Context(command, info_name="stats", parent=top)
    read_config(context, str(path))


@cache
def _commands() -> Any:
    return get_command(app)


def _pair(path: Path) -> None:
    found = PairSpec.read(path)
    fields = {k: v for k, v in dataclasses.asdict(found).items() if v is not None}
    path.write_text(toml_text({"schema": "quantkit.pair/1", **_no_none(fields)}), encoding="utf-8")
    assert PairSpec.read(path) == found


def _no_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_none(item) for key, item in value.items() if item is not None}
    return [_no_none(item) for item in value] if isinstance(value, list | tuple) else value


def _cells(path: Path) -> None:
    Cells(path.parent, _KEY)


def _items(path: Path) -> None:
    read_items(str(path))


def _tensors(path: Path) -> None:
    read_tensors(path, recording.OBSERVATIONS_SCHEMA, "calibrate again")


def _observations(path: Path) -> None:
    found, identity = recording.load(path)
    again = path.with_name("again.safetensors")
    recording.save(again, found, identity)
    assert recording.load(again)[1] == identity


def _gguf() -> bytes:
    """Returns a GGUF file: three fields, one of them a list of words, and two tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("llama.block_count", 1)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "<s>"])
        for name in ("token_embd.weight", "output.weight"):
            writer.add_tensor(name, np.ones((3, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _observed() -> bytes:
    """Returns a file of observations: one tensor, two classes."""
    x = torch.linspace(-2.0, 3.0, 24)[None]
    bundle = Bundle.empty(1).update(x, torch.zeros(x.shape, dtype=torch.int64))
    moving = MovingAverage.empty(1).update(0, x.amin(1), x.amax(1))
    seen = Observation(
        point="hidden_state",
        granularity="tensor",
        classes={"first": bundle, "others": bundle},
        moving=moving,
    )
    tensors = {f"0|{key}": value for key, value in seen.state().items()}
    plain = {
        "schema": recording.OBSERVATIONS_SCHEMA,
        "identity": {"model": "m"},
        "names": {"hidden_state/layers.0": 0},
        "kinds": [["hidden_state", "tensor"]],
        "batches": 1,
        "samples": 1,
        "hits": {"hidden_state": {"layers.0": [1, 24]}},
        "notes": [],
        "checkpoints": [1],
    }
    tensors["checkpoint 0|hidden_state/layers.0"] = torch.tensor([[-2.0], [3.0]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.safetensors"
        write_tensors(path, tensors, plain)
        return path.read_bytes()


def example(kind: Any) -> Any:
    """Returns the JSON data of a small value of an annotation, every field of a class given."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {
            field.name: field.default if field.name == "schema" else example(hints[field.name])
            for field in dataclasses.fields(kind)
        }
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return example(args[0])
    if origin in (list, tuple):
        return [example(args[0])]
    if origin is dict:
        return {"a": example(args[1])}
    return {float: 0.5, int: 3, str: "word", bool: True, type(None): None}[kind]


def _short(plain: Any) -> Any:
    """Returns JSON data with two items of each list, three of each long table."""
    if isinstance(plain, dict):
        return {key: _short(item) for key, item in plain.items()}
    return [_short(item) for item in plain[:2]] if isinstance(plain, list) else plain
