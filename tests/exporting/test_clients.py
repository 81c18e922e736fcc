"""Real clients of an exported folder: the same 64 tokens from each, and from torch in float.

optimum-onnx cannot share this environment: see `benchmarks/clients.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.exporters import ExportedModel

from quantkit.exporting.companions import component, save_companions
from quantkit.exporting.graphs import load_graph, save_graph
from quantkit.exporting.layouts import apply_layout
from quantkit.exporting.quantize import quantize_graph
from quantkit.jobs.formats import ExportFormat
from quantkit.models import LoadedModel
from quantkit.onnx_runtime import open_decoder
from quantkit.quantization import fake_quantized
from quantkit.results import write_json
from tests.conftest import byte_tokenizer
from tests.exporting.conftest import VOCABULARY, Exported

ROOT = Path(__file__).parents[2]
NEW = 64
PROMPT = "Hello"
"""Its bytes are among the tiny models' 128 tokens."""
FORMATS = ["float", "w8a8", "w8a8-dynamic", "w4a16", "w8a16-block"]


def built(case: Exported, text: str, folder: Path, layout: str = "transformers") -> Path:
    """Returns a folder with graph, config, tokenizer and the entry of export.json."""
    form = ExportFormat.parse("none" if text == "float" else text)
    model = load_graph(case.path)
    if text != "float":
        model, _ = quantize_graph(
            case.path,
            module_linears=case.linears,
            recipe=form.recipe,
            ranges=case.ranges,
            storage=form.storage,
        )
    apply_layout(model, layout)
    path = save_graph(model, folder)
    loaded = LoadedModel(
        name="n", source="s", model=case.model, tokenizer=byte_tokenizer(add_bos=False), sha256=""
    )
    save_companions(loaded, folder)
    found = component(path, type(case.model).__name__)
    write_json(folder / "export.json", {"export_format": "onnx", "components": {"model": found}})
    return folder


def prompt(folder: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids
    assert len(ids) == 5 and max(ids) < VOCABULARY
    return ids


def ours(folder: Path, ids: list[int]) -> list[int]:
    session = open_decoder(folder / "model.onnx", threads=1)
    new, past, written = np.array([ids]), (), []
    for _ in range(NEW):
        output = session.run(new, None, past)
        past = output.present
        new = output.logits[:, -1:].argmax(-1)
        written.append(int(new[0, 0]))
    return written


def runner(folder: Path, ids: list[int]) -> list[int]:
    """By transformers: what a call returns as the cache is what the next one takes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    exported = ExportedModel.from_pretrained(folder, session_options=options)
    kind = type(exported.runners["model"])
    assert (kind.__module__.split(".")[0], kind.__name__) == ("transformers", "OnnxModelRunner")
    config: Any = exported.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    empty = torch.zeros(1, heads, 0, width)
    cache: Any = {
        str(layer): {"key": empty, "value": empty} for layer in range(config.num_hidden_layers)
    }
    new, written = torch.tensor([ids]), []
    for step in range(NEW):
        mask = torch.ones(1, len(ids) + step, dtype=torch.int64)
        output = exported(input_ids=new, attention_mask=mask, past_key_values=cache)
        cache = output["past_key_values"]
        new = output["logits"][:, -1:].argmax(-1)
        written.append(int(new))
    return written


@pytest.fixture(scope="module")
def readme() -> str:
    """The program that the README shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# generate\.py.*?)```", text, flags=re.DOTALL)
    assert found is not None, "the README shows no generate.py"
    assert found[1].count("\n") <= 40
    return found[1]


def shown(program: str) -> Callable[[Path, list[int]], list[int]]:
    names: dict[str, Any] = {"__name__": "generate"}
    exec(compile(program, "README.md", "exec"), names)
    generate: Callable[[Path, list[int]], list[int]] = names["generate"]
    return generate


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_every_client_writes_the_same(
    exported: Callable[[str], Exported], tmp_path: Path, readme: str, kind: str, text: str
) -> None:
    folder = built(exported(kind), text, tmp_path)
    ids = prompt(folder)
    expected = ours(folder, ids)
    assert len(set(expected)) > 8  # a model that repeats itself would agree by chance
    assert runner(folder, ids) == expected
    assert shown(readme)(folder, ids) == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "diff"])
def test_in_float_it_is_what_torch_generates(
    exported: Callable[[str], Exported], tmp_path: Path, readme: str, kind: str
) -> None:
    case = exported(kind)
    folder = built(case, "float", tmp_path)
    ids = torch.tensor([prompt(folder)])
    made: Tensor = case.model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = made[0, ids.shape[1] :].tolist()
    assert len(expected) == NEW
    assert ours(folder, ids[0].tolist()) == expected
    assert shown(readme)(folder, ids[0].tolist()) == expected


def test_the_readmes_program_takes_positions_as_well(
    exported: Callable[[str], Exported], tmp_path: Path, readme: str
) -> None:
    case = exported("gpt2")
    plain, optimum = (
        built(case, "w8a8", tmp_path / layout, layout) for layout in ("transformers", "optimum")
    )
    names = [v.name for v in load_graph(optimum / "model.onnx").graph.inputs]
    assert "position_ids" in names
    ids = prompt(plain)
    assert shown(readme)(optimum, ids) == ours(plain, ids)


def test_the_readmes_program_runs_by_itself(
    exported: Callable[[str], Exported], tmp_path: Path, readme: str
) -> None:
    folder = built(exported("llama"), "w8a8", tmp_path / "out")
    (tmp_path / "generate.py").write_text(readme, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "generate.py", str(folder), PROMPT],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    written = ours(folder, prompt(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert run.stdout == tokenizer.decode(written) + "\n"
    assert "quantkit" not in re.sub(r"#.*", "", readme)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("batch", "cuts"),
    [(1, (1,)), (5, (3, 1, 1)), (3, (11, 2)), (1, (33,))],
    ids=["one token", "one by one", "twelve and two", "a long prompt"],
)
def test_batch_and_lengths_are_free(
    exported: Callable[[str], Exported],
    tmp_path: Path,
    text: str,
    batch: int,
    cuts: tuple[int, ...],
) -> None:
    """The trace saw 2 sequences of 3 tokens behind 4; a cache may be empty or filled."""
    case = exported("llama")
    folder = built(case, text, tmp_path)
    session = open_decoder(folder / "model.onnx", threads=1)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (batch, sum(cuts)), generator=generator)
    mask = torch.ones_like(ids)
    past: Any = ()
    pieces = []
    for piece in ids.split(list(cuts), dim=1):
        output = session.run(piece.numpy(), None, past)
        past = output.present
        pieces.append(output.logits)
    got = torch.from_numpy(np.concatenate(pieces, axis=1))
    recipe = ExportFormat.parse("none" if text == "float" else text).recipe
    with fake_quantized(case.model, recipe, case.ranges):
        expected = case.forward(ids, mask)
    assert got.shape == expected.shape
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0)
    assert cosine > (0.999 if recipe.activations is not None else 0.99999)
