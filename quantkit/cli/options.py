"""The options that commands share: one name, one help text, one unit each."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.errors import InputError
from quantkit.jobs import ATTENTION_BITS, BOS, DTYPES, EXPORT_NAMES, LAYOUTS, OPSETS, STORAGES

MODEL_WORDS = (
    "A local transformers folder, a hub id, a .gguf file, timm:NAME, or the name of a shipped "
    "model: baseline, diff, smollm2, minilm, dinov2-small"
)
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help=f"{MODEL_WORDS}.",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", show_default=False, help=f"One or more models. {MODEL_WORDS}."),
]
_SOURCE = (
    "a named set (quantkit calib ls), a text file, a folder of .txt files, or a .jsonl file with a "
    "text field."
)
Calib = Annotated[str, typer.Option("--calib", metavar="SET", help=f"Calibration text: {_SOURCE}")]
Eval = Annotated[
    str,
    typer.Option(
        "--eval",
        metavar="SET",
        help=f"Evaluation text: {_SOURCE} Where it is the calibration text, the blocks after "
        "calibration's are taken.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "--text",
        "--calib",
        metavar="SET",
        show_default=False,
        help=f"What the model reads: {_SOURCE} For an image model a folder of images, or a "
        "named set of them. For any model a .npz of its inputs. Default: pydoc, or shapes.",
    ),
]
Text = Annotated[str, typer.Option("--text", "--calib", metavar="SET", help=f"Text: {_SOURCE}")]
Ranges = Annotated[
    str | None,
    typer.Option(
        "--ranges",
        metavar="RUN",
        show_default=False,
        help="Folder of a calibrate or compare run of this model: its ranges and its smoothing are "
        "taken.",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="LIST",
        show_default=False,
        help="Quantizers that stay in float: names as in ranges.json, such as "
        "linear_input/model.layers.0.mlp.down_proj, or the folder of a quantkit sensitivity, for "
        "those that it suggests.",
    ),
]
AllowOverlap = Annotated[
    bool,
    typer.Option(
        "--allow-overlap",
        help="Run although calibration has seen the evaluation text, or nobody can tell; recorded.",
    ),
]
SeqLen = Annotated[int, typer.Option("--seq-len", metavar="N", help="Tokens a block.")]
Samples = Annotated[int, typer.Option("--samples", metavar="N", help="Blocks, at most.")]
CalibSamples = Annotated[
    int, typer.Option("--calib-samples", metavar="N", help="Blocks that are calibration's.")
]
EvalSamples = Annotated[
    int, typer.Option("--eval-samples", metavar="N", help="Blocks of evaluation, at most.")
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", help="Blocks at a time; results do not change.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="TYPE", help=f"Computed in: {', '.join(DTYPES)}.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Computed on: cpu (others come later).")
]
Bos = Annotated[
    str,
    typer.Option(
        "--bos",
        metavar="WHEN",
        help=f"Begin-of-sequence token before each block: {', '.join(BOS)}. auto does what the "
        "tokenizer's own configuration does.",
    ),
]
Bits = Annotated[
    str,
    typer.Option(
        "--bits", metavar="LIST", help="Bits of the attention logits, 2 to 15; 16: not quantized."
    ),
]
Granularity = Annotated[
    str,
    typer.Option(
        "--granularity",
        metavar="LIST",
        help="What shares one scale of the logits: tensor (a sequence and layer), head, row.",
    ),
]
AttentionBits = Annotated[
    int,
    typer.Option(
        "--attention-bits",
        metavar="N",
        help=f"Bits of the attention logits in the graph: {', '.join(map(str, ATTENTION_BITS))} "
        "(16: not quantized).",
    ),
]
Opset = Annotated[
    int,
    typer.Option("--opset", metavar="N", help=f"ONNX operator set: {', '.join(map(str, OPSETS))}."),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="RECIPE",
        help="What to quantize: a recipe such as w8a8, w8, w4:group32, w8a8+logits6:head:static; a "
        f"name ({', '.join(EXPORT_NAMES)}); 16 for half precision; none; or auto, which needs "
        "--max-drop. Logits on a grid show what integer hardware will compute; no CPU gets faster.",
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        "--max-drop",
        metavar="SHARE",
        show_default=False,
        help="Of --quantize auto: what the metric may lose, e.g. 1%: relative for perplexity, in "
        "points for accuracies. The fastest graph within it is written.",
    ),
]
AutoTask = Annotated[
    str,
    typer.Option(
        "--task", metavar="TASK", help="Of --quantize auto: what is measured, as in a sweep."
    ),
]
SearchSamples = Annotated[
    int,
    typer.Option(
        "--search-samples",
        metavar="N",
        help="Of --quantize auto: blocks that the choice is made on, between calibration's and "
        "evaluation's.",
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="FORM",
        show_default=False,
        help=f"How weights by group are held: {', '.join(STORAGES)}. Default: qdq, standard "
        "operators; matmulnbits is ONNX Runtime's own.",
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        "--layout",
        metavar="NAME",
        help=f"Whose loaders the names and files are for: {', '.join(LAYOUTS)}.",
    ),
]
ExportMethod = Annotated[
    str,
    typer.Option(
        "--method", metavar="METHOD", help="How static ranges are chosen, as in calibrate."
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        show_default=False,
        help="Folder with the tokenizer of an .onnx file that reads text. Default: the file's own.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the bootstrap resampling.")]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        show_default=False,
        help="Folder to write to. Default: reports/<command>-<models>-<hash of the config>; the "
        "same configuration goes on where it stopped.",
    ),
]
PATTERNS = "glob patterns on module names"
AllowUnseen = Annotated[
    str | None,
    typer.Option(
        "--allow-unseen",
        metavar="LIST",
        show_default="none",
        help=f"What need not run, e.g. experts: {PATTERNS}.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace what another configuration left in --out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result file to stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no tables; errors only.")
]


def words(name: str, text: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list, each once.

    Raises:
        InputError: an empty part, or one that stands twice.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise InputError(f"--{name} takes a comma-separated list, got {text!r}.")
    twice = [part for part in parts if parts.count(part) > 1]
    if twice:
        raise InputError(f"--{name} has {twice[0]!r} twice.")
    return parts


def fractions(name: str, text: str) -> tuple[float, ...]:
    """Returns a comma-separated list of numbers.

    Raises:
        InputError: a part is no number.
    """
    try:
        return tuple(float(part) for part in words(name, text))
    except ValueError:
        raise InputError(f"--{name} takes numbers such as 0.99,0.999; got {text!r}.") from None


def share(name: str, text: str) -> float:
    """Returns a fraction that is written as such, or in percent.

    Raises:
        InputError: neither.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100.0 if percent else 1.0)
    except ValueError:
        raise InputError(f"--{name} takes a share such as 1% or 0.01; got {text!r}.") from None


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Returns a comma-separated list of whole numbers.

    Raises:
        InputError: a part is no whole number.
    """
    parts = words(name, text)
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= 6):
            raise InputError(f"--{name} takes whole numbers such as 16,8,6,4; got {part!r}.")
    return tuple(int(part) for part in parts)
