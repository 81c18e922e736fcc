"""What is killed: every long command, on models and text so small that a run takes seconds."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .forks import Ended, Traced, command, forked

PAIR: Final = """\
schema = "quantkit.pair/1"
name = "tiny"
arms = ["baseline", "diff"]
seeds = [0]
[sizes]
layers = 1
width = 96
heads = 6
vocabulary = 400
context = 32
[training]
steps = 8
batch = 4
warmup_steps = 2
autocast = "none"
[records]
checkpoint_every = 4
curves_every = 2
measure_every = 8
measure_rows = 2
measure_items = 0
measure_bits = [4]
[data]
held_out = 0.2
[[text]]
source = "{text}"
"""
COMMANDS: Final = (
    "stats", "calibrate", "sensitivity", "sweep", "export", "auto", "diagnose", "compare", "train",
    "report",
)  # fmt: skip
BLOCKS: Final = ("--seq-len", "32", "--batch-size", "2")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line without its --out; `resumes`: what a kill leaves is used again in parts."""

    name: str
    arguments: tuple[str, ...]
    resumes: bool = False


def make_inputs(folder: Path, names: Sequence[str] = COMMANDS) -> dict[str, Command]:
    """Returns the commands by name, with what those named read written to the folder.

    Raises:
        RuntimeError: something that is not killed fails.
    """
    folder.mkdir(parents=True)
    Traced.folder = folder / "traced"
    _done(forked(lambda: _write_models(folder), folder))
    models = [str(folder / name) for name in ("alpha", "beta")]
    text = _write_text(folder)
    pair = folder / "tiny.toml"
    pair.write_text(PAIR.format(text=folder / "prose"), encoding="utf-8")
    ranges, graphs, swept, looked = (
        folder / name for name in ("ranges", "graphs", "swept", "seen")
    )
    calib = ("--calib", text, "--samples", "8", *BLOCKS)
    both = ("--text", text, "--calib-samples", "4", "--eval-samples", "6", *BLOCKS)
    sweep = ("sweep", *models, "--bits", "16,8,4", "--granularity", "tensor,row")
    sweep = (*sweep, "--eval", text, "--samples", "6", *BLOCKS)
    stats = ("stats", models[0], "--data", text, "--samples", "8", *BLOCKS)
    export = ("export", models[0], "--eval", text, "--eval-samples", "6", *calib)
    commands = {
        "stats": stats,
        "calibrate": ("calibrate", models[0], *calib, "--smooth", "0.5", "--weights", "channel"),
        "sensitivity": (
            "sensitivity", models[0], "--ranges", str(ranges), "--eval", text, "--samples", "4",
            *BLOCKS,
        ),
        "sweep": sweep,
        "export": (*export, "--quantize", "w8a8"),
        "auto": (*export, "--quantize", "auto", "--max-drop", "50%", "--search-samples", "8"),
        "diagnose": (
            "diagnose", str(graphs / "float" / "model.onnx"), str(graphs / "model.onnx"),
            "--calib", text, "--tokenizer", models[0], "--seq-len", "32", "--samples", "4",
        ),
        "compare": ("compare", *models, *both, "--attention-bits", "8"),
        "train": ("train", str(pair)),
        "report": ("report", str(looked), str(swept)),
    }  # fmt: skip
    for arguments, out, reader in (
        (("calibrate", models[0], *calib), ranges, "sensitivity"),
        (commands["export"], graphs, "diagnose"),
        (sweep, swept, "report"),
        (stats, looked, "report"),
    ):
        if reader in names:
            _done(command((*arguments, "--out", str(out)), folder))
    resumed = ("calibrate", "sensitivity", "sweep", "auto", "compare", "train")
    return {
        name: Command(name=name, arguments=arguments, resumes=name in resumed)
        for name, arguments in commands.items()
    }


def _done(ended: Ended) -> None:
    if ended.code:
        raise RuntimeError(f"what the kills need cannot be made (exit {ended.code}): {ended.said}")


def _write_text(folder: Path) -> str:
    """Writes a text, and a folder of short ones; returns the path of the first."""
    topics = [str(topic)[:2000] for topic in list(pydoc_data.topics.topics.values())[:24]]
    (folder / "prose").mkdir()
    for number, topic in enumerate(topics):
        (folder / "prose" / f"{number:02}.txt").write_text(topic, encoding="utf-8")
    path = folder / "text.txt"
    path.write_text("\n".join(topics), encoding="utf-8")
    return str(path)


def _write_models(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {"<s>": 256}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    make: Callable[..., Any] = LlamaForCausalLM
    for seed, name in enumerate(("alpha", "beta")):
        torch.manual_seed(seed)
        model = make(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(4)  # so that one token is the likeliest by far
        model.save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>").save_pretrained(
            folder / name
        )


def with_out(one: Command, out: Path) -> Sequence[str]:
    """Returns the whole command line."""
    return (*one.arguments, "--out", str(out))
