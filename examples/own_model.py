"""Your own model, from its folder to a quantized ONNX file that was checked in ONNX Runtime.

A small random Llama with one outlier channel stands for yours. Prints its largest hidden states,
the perplexity at 16, 8 and 4 bits of attention logits, and what the int8 file costs. Seconds.

    python examples/own_model.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quantkit
from quantkit.models import load

CHANNEL = 5


def make_model(folder: Path) -> None:
    """Saves a model and its tokenizer, as `save_pretrained` of any other would."""
    tokenizer = load("baseline").tokenizer  # a model that ships with quantkit
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[CHANNEL] *= 400
        model.model.layers[1].self_attn.q_proj.weight *= 100  # so that bits of logits matter
        model.lm_head.weight *= 10
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    make_model(folder)
    data = {"seq_len": 64, "samples": 4}

    stats = quantkit.stats(folder, "docstrings", **data, out=folder / "stats")
    layer = next(g for g in stats.points["hidden_state"] if g.layer == 0)
    print(f"largest |hidden state|: {layer.abs_max:.2f} in channel {layer.top[0].channel}")

    sweep = quantkit.sweep(
        folder, eval="docstrings", calib=None, **data, bits=(16, 8, 4), granularity="row",
        out=folder / "sweep",
    )  # fmt: skip
    for cell in sweep.cells:
        if cell.metric == "perplexity":
            print(f"{cell.bits} bits: perplexity {cell.value:.2f}")

    export = quantkit.export(
        folder, quantize="w8a8-dynamic", calib="docstrings", eval="docstrings", **data,
        eval_samples=4, out=folder / "onnx",
    )  # fmt: skip
    assert export.accuracy is not None
    both = export.accuracy  # of other blocks than the sweep's: those behind the calibration's
    print(f"in ONNX Runtime: float {both.float:.2f}, int8 {both.quantized:.2f}, in {export.folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "my-model")
