"""Exported SmolLM2 in optimum-onnx 0.1.0, which needs an environment of its own.

That environment is made once, in benchmarks/data/optimum (or `--python PATH`: one that is there).
For float, w8a8 and w8a8-dynamic, in both layouts: 64 tokens, greedy, from `ORTModelForCausalLM`
there and from quantkit's own session here, token by token, and whether optimum calls the graph
"legacy" (it does where positions are no input). Two prompts of different length in one batch,
padded on the left as `generate` wants it, beside each prompt alone. Then a graph that
`optimum-cli export onnx` wrote there goes through `quantkit export model.onnx` here, and back.

    python benchmarks/clients.py [--new 64] [--python PATH] [--folder KEPT]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "results" / "clients.json"
ENVIRONMENT = HERE / "data" / "optimum"
REQUIREMENTS = ("torch==2.13.0", "optimum-onnx==0.1.0", "onnxruntime==1.32.0")
MODEL = "smollm2"
RECIPES = {"float": "none", "w8a8": "w8a8", "w8a8-dynamic": "w8a8:token:symmetric"}
LAYOUTS = ("transformers", "optimum")
PROMPTS = ("The function returns a list of", "Water")
FOREIGN = "optimum-cli"
PLAN = "clients.json"
LEGACY = "legacy ONNX model"


def prepare(folder: Path, new: int) -> dict[str, Any]:
    """Writes every graph with what lies beside it; returns our own tokens, by folder."""
    from quantkit.exporting import load_graph, quantize_graph, save_graph
    from quantkit.exporting.checks import check_graph
    from quantkit.exporting.companions import save_companions
    from quantkit.exporting.layouts import apply_layout
    from quantkit.jobs import ExportJob
    from quantkit.models import load, projection_modules
    from quantkit.pipelines.export import run_export
    from quantkit.recipe import Recipe
    from quantkit.results import Ranges, read_json

    job = ExportJob(
        model=MODEL, seq_len=256, samples=16, eval_samples=2, out=str(folder / "w8a8-proven")
    )
    run = run_export(job)
    ranges = read_json(run / "ranges.json", Ranges).tensors
    loaded = load(MODEL)
    modules = dict(projection_modules(loaded.model))
    prompts = [loaded.tokenizer(text).input_ids for text in PROMPTS]
    graphs: dict[str, Any] = {}
    for name, text in RECIPES.items():
        for layout in LAYOUTS:
            path = run / "float" / "model.onnx"
            graph = load_graph(path)
            if name != "float":
                recipe = Recipe.parse(text)
                graph, _ = quantize_graph(
                    path, module_linears=modules, recipe=recipe, ranges=ranges
                )
            apply_layout(graph, layout)
            target = folder / f"{name}, {layout}"
            written = save_graph(graph, target)
            save_companions(loaded, target)
            check_graph(written, ["ai.onnx"])
            graphs[target.name] = [_ours(written, ids, new) for ids in prompts]
    _write_foreign_source(folder / "tiny")
    plan = {"prompts": prompts, "new": new, "graphs": graphs}
    (folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    return plan


def _ours(path: Path, ids: list[int], new: int) -> list[int]:
    import numpy as np

    from quantkit.onnx_runtime import open_decoder

    session = open_decoder(path, threads=1)
    tokens, past, written = np.array([ids], np.int64), (), []
    for _ in range(new):
        output = session.run(tokens, None, past)
        past = output.present
        tokens = output.logits[:, -1:].argmax(-1)
        written.append(int(tokens[0, 0]))
    return written


def _write_foreign_source(folder: Path) -> None:
    """A random Llama with SmolLM2's tokenizer, by names that transformers 4 reads."""
    import dataclasses

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit.exporting.companions import save_companions
    from quantkit.models import load

    smollm2 = load(MODEL)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=smollm2.model.config.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.15,
        )
    ).eval()
    model.save_pretrained(folder)
    save_companions(dataclasses.replace(smollm2, model=model), folder)


def run_foreign(folder: Path) -> None:
    """In the other environment: generates from every graph, and exports a model by its CLI."""
    import logging

    import onnx
    import onnxruntime
    import optimum.version
    import torch
    import transformers
    from optimum.onnxruntime import ORTModelForCausalLM

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("optimum.onnxruntime.modeling_decoder").addHandler(handler)
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1  # as here
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    rows = []
    for name, ours in plan["graphs"].items():
        said.clear()
        model = ORTModelForCausalLM.from_pretrained(folder / name, session_options=session_options)
        padded = transformers.AutoTokenizer.from_pretrained(folder / name, padding_side="left")

        def generate(batch: list[list[int]], model: Any = model, pad: Any = padded) -> Any:
            inputs = pad.pad({"input_ids": batch}, return_tensors="pt")
            made = model.generate(
                **inputs, max_new_tokens=plan["new"], min_new_tokens=plan["new"], do_sample=False
            )
            return made[:, inputs["input_ids"].shape[1] :].tolist()

        alone = [generate([ids])[0] for ids in plan["prompts"]]
        rows.append(
            {
                "graph": name,
                "equal": [_equal(a, b) for a, b in zip(alone, ours, strict=True)],
                "equal_in_a_padded_batch": [
                    _equal(a, b) for a, b in zip(generate(plan["prompts"]), ours, strict=True)
                ],
                "called_legacy": any(LEGACY in text for text in said),
            }
        )
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "onnx"]
    command += ["--model", str(folder / "tiny"), "--task", "text-generation-with-past"]
    subprocess.run([*command, str(folder / FOREIGN)], check=True, capture_output=True)
    versions = {
        "optimum": optimum.version.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    found = {"versions": versions, "graphs": rows}
    (folder / "foreign.json").write_text(json.dumps(found), encoding="utf-8")


def _equal(one: list[int], other: list[int]) -> int:
    """Returns how many tokens agree before the first that does not."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(one))


def export_their_graph(folder: Path) -> dict[str, Any]:
    """Returns what `quantkit export model.onnx` makes of optimum's file."""
    from quantkit.exporting.checks import check_graph
    from quantkit.jobs import ExportJob
    from quantkit.onnx_runtime import open_decoder
    from quantkit.pipelines.export import run_export
    from quantkit.results import Export, read_json

    source = folder / FOREIGN / "model.onnx"
    job = ExportJob(
        model=str(source),
        recipe="w8a8-dynamic",
        seq_len=128,
        samples=4,
        eval_samples=4,
        out=str(folder / "from-optimum"),
    )
    run = run_export(job)
    check_graph(run / "model.onnx", ["ai.onnx"])
    layout = open_decoder(run / "model.onnx").layout
    export = read_json(run / "export.json", Export)
    return {
        "recipe": export.recipe,
        "quantizers": len(export.quantizers),
        "cache_tensors": len(layout.past),
        "takes_positions": layout.positions is not None,
        "passed": export.passed,
    }


def other_python(given: Path | None) -> Path:
    """Returns the interpreter of the other environment, made where it is not there."""
    if given is not None:
        return given
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "bin" / "optimum-cli").is_file():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    return python


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'graph':<28} {'equal tokens':>14} {'padded batch':>14} {'legacy':>7}")
    for row in result["graphs"]:
        alone, batch = (
            " ".join(map(str, row[key])) for key in ("equal", "equal_in_a_padded_batch")
        )
        print(f"{row['graph']:<28} {alone:>14} {batch:>14} {row['called_legacy']!s:>7}")
    print(f"of {result['new']}; optimum-cli's graph: {result['optimum_cli']}")


def main() -> None:
    """Measures, writes the file, prints the table; exits 1 where a client writes anything else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--python", type=Path, help="of an environment with optimum-onnx 0.1.0")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, help="keep the graphs here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_foreign(options.child)
        return
    python = other_python(options.python)
    with tempfile.TemporaryDirectory() as aside:
        folder = (options.folder or Path(aside)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, options.new)
        subprocess.run([python, __file__, "--child", str(folder)], check=True)
        result: dict[str, Any] = {"model": MODEL, "new": options.new, "prompts": list(PROMPTS)}
        result |= json.loads((folder / "foreign.json").read_text(encoding="utf-8"))
        result["optimum_cli"] = export_their_graph(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_table(result)
    if any(count < options.new for row in result["graphs"] for count in row["equal"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
