"""The options that commands share: one name, one help text, one unit, one panel each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantkit.cli import complete
from quantkit.cli.config import read_config
from quantkit.cli.help import COMPUTED, OUTPUT
from quantkit.jobs import ATTENTION_BITS, BOS, DTYPES, EXPORT_NAMES, LAYOUTS, OPSETS, STORAGES

DATA, MEASURED, QUANTIZED = "Data", "What is measured", "What is quantized"
RANGES = "How ranges are chosen"
MODEL_WORDS = (
    "A local transformers folder, a hub id, a .gguf file, timm:NAME, or the name of a shipped "
    "model: baseline, diff, smollm2, minilm, dinov2-small (quantkit models)"
)


def option(*names: str, panel: str, **how: Any) -> Any:
    """Returns a `typer.Option` in a panel of the help page."""
    return typer.Option(*names, rich_help_panel=panel, **how)


def argument(metavar: str, words: str, **how: Any) -> Any:
    """Returns a `typer.Argument` that has no default to show."""
    return typer.Argument(metavar=metavar, help=words, show_default=False, **how)


Model = Annotated[str, argument("MODEL", f"{MODEL_WORDS}.", autocompletion=complete.models)]
Models = Annotated[
    list[str],
    argument("MODEL", f"One or more models. {MODEL_WORDS}.", autocompletion=complete.models),
]
_SOURCE = (
    "a named set (quantkit calib ls), a text file, a folder of .txt files, or a .jsonl file with a "
    "text field."
)
_SET: dict[str, Any] = {"metavar": "SET", "panel": DATA, "autocompletion": complete.sets}
Calib = Annotated[str, option("--calib", help=f"Calibration text: {_SOURCE}", **_SET)]
CalibOrNone = Annotated[
    str, option("--calib", help=f"Calibration text: {_SOURCE} Or none.", **_SET)
]
Eval = Annotated[
    str,
    option(
        "--eval",
        help=f"Evaluation text: {_SOURCE} Where it is the calibration text, the blocks after "
        "calibration's are taken.",
        **_SET,
    ),
]
Data = Annotated[
    str | None,
    option(
        "--data",
        "--text",
        "--calib",
        show_default="pydoc; of an image model, shapes",
        help=f"What the model reads: {_SOURCE} For an image model a folder of images, an "
        "Ultralytics data.yaml (its val; data.yaml#train), or a named set of images. For "
        "any model a .npz of its inputs.",
        **_SET,
    ),
]
Text = Annotated[str, option("--text", "--calib", help=f"Text: {_SOURCE}", **_SET)]
Ranges = Annotated[
    str | None,
    option(
        "--ranges",
        panel=RANGES,
        metavar="RUN",
        show_default="calibrated now",
        help="Folder of a calibrate or compare run of this model: its ranges and its smoothing are "
        "taken.",
    ),
]
Keep = Annotated[
    str | None,
    option(
        "--keep",
        panel=QUANTIZED,
        metavar="LIST",
        show_default="none",
        help="Quantizers that stay in float: names as in ranges.json, such as "
        "linear_input/model.layers.0.mlp.down_proj, or the folder of a quantkit sensitivity, for "
        "those that it suggests.",
    ),
]
AllowOverlap = Annotated[
    bool,
    option(
        "--allow-overlap",
        panel=DATA,
        help="Run although calibration has seen the evaluation text, or nobody can tell; recorded.",
    ),
]
SeqLen = Annotated[
    int, option("--seq-len", panel=DATA, metavar="TOKENS", help="Length of a block.")
]
Samples = Annotated[
    int, option("--samples", panel=DATA, metavar="BLOCKS", help="Blocks that are read, at most.")
]
CalibSamples = Annotated[
    int,
    option("--calib-samples", panel=DATA, metavar="BLOCKS", help="Blocks of calibration."),
]
EvalSamples = Annotated[
    int,
    option("--eval-samples", panel=DATA, metavar="BLOCKS", help="Blocks of evaluation, at most."),
]
BatchSize = Annotated[
    int,
    option(
        "--batch-size",
        panel=DATA,
        metavar="BLOCKS",
        help="Blocks at a time; results do not change.",
    ),
]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        panel=COMPUTED,
        metavar="TYPE",
        help=f"Computed in: {', '.join(DTYPES)}.",
        autocompletion=complete.one_of(*DTYPES),
    ),
]
Device = Annotated[
    str,
    option(
        "--device",
        panel=COMPUTED,
        metavar="DEVICE",
        help="Computed on: cpu (others come later).",
    ),
]
Bos = Annotated[
    str,
    option(
        "--bos",
        panel=DATA,
        metavar="WHEN",
        help=f"Begin-of-sequence token before each block: {', '.join(BOS)}. auto does what the "
        "tokenizer's own configuration does.",
        autocompletion=complete.one_of(*BOS),
    ),
]
Tasks = Annotated[
    str,
    option(
        "--task",
        panel=MEASURED,
        metavar="LIST",
        help="Tasks: perplexity, multiple-choice[=FILE.jsonl], "
        "needles[:needles=N:queries=N:tokens=N:depths=A/B], icl[:labels=N:shots=N:orders=N], "
        "lm-eval=TASK, image-classification=FOLDER. Unless they say so: 4 needles, 2 of them "
        "asked; 4 labels, 32 shots, 5 orders.",
    ),
]
Items = Annotated[
    int,
    option(
        "--items",
        panel=MEASURED,
        metavar="ITEMS",
        help="Of every task but perplexity, at most.",
    ),
]
Bits = Annotated[
    str,
    option(
        "--bits",
        panel=QUANTIZED,
        metavar="LIST",
        help="Bits of the attention logits, 2 to 15; 16: not quantized.",
    ),
]
Granularity = Annotated[
    str,
    option(
        "--granularity",
        panel=QUANTIZED,
        metavar="LIST",
        help="What shares one scale of the logits: tensor (a sequence and layer), head, row.",
    ),
]
RangeKind = Annotated[
    str,
    option(
        "--range",
        panel=QUANTIZED,
        metavar="LIST",
        help="Of the bits of the logits: dynamic (of the call), static (calibrated, of --ranges in "
        "a sweep; not for row).",
    ),
]
AttentionBits = Annotated[
    int,
    option(
        "--attention-bits",
        panel=QUANTIZED,
        metavar="BITS",
        help=f"Of the attention logits in the graph: {', '.join(map(str, ATTENTION_BITS))} "
        "(16: not quantized).",
        autocompletion=complete.one_of(*ATTENTION_BITS),
    ),
]
Opset = Annotated[
    int,
    option(
        "--opset",
        panel=OUTPUT,
        metavar="VERSION",
        help=f"ONNX operator set: {', '.join(map(str, OPSETS))}.",
        autocompletion=complete.one_of(*OPSETS),
    ),
]
Quantize = Annotated[
    str,
    option(
        "--quantize",
        panel=QUANTIZED,
        metavar="RECIPE",
        help="What to quantize: a recipe such as w8a8, w8, w4:group32, w8a8+logits6:head:static; a "
        f"name ({', '.join(EXPORT_NAMES)}); 16 for half precision; none; or auto, which needs "
        "--max-drop. Logits on a grid show what integer hardware will compute; no CPU gets faster.",
        autocompletion=complete.one_of("w8a8", *EXPORT_NAMES, "auto"),
    ),
]
MaxDrop = Annotated[
    str | None,
    option(
        "--max-drop",
        panel="With --quantize auto",
        metavar="SHARE",
        show_default="none; required",
        help="What the metric may lose, e.g. 1%: relative for perplexity, in points for "
        "accuracies. The fastest graph within it is written.",
    ),
]
AutoTask = Annotated[
    str,
    option(
        "--task",
        panel="With --quantize auto",
        metavar="TASK",
        help="What is measured, as in a sweep.",
    ),
]
SearchSamples = Annotated[
    int,
    option(
        "--search-samples",
        panel="With --quantize auto",
        metavar="BLOCKS",
        help="Those that the choice is made on, between calibration's and evaluation's.",
    ),
]
StorageOption = Annotated[
    str | None,
    option(
        "--storage",
        panel=OUTPUT,
        metavar="FORM",
        show_default="qdq",
        help=f"How weights by group are held: {', '.join(STORAGES)}. qdq: standard operators; "
        "matmulnbits is ONNX Runtime's own.",
        autocompletion=complete.one_of(*STORAGES),
    ),
]
Layout = Annotated[
    str,
    option(
        "--layout",
        panel=OUTPUT,
        metavar="NAME",
        help=f"Whose loaders the names and files are for: {', '.join(LAYOUTS)}.",
        autocompletion=complete.one_of(*LAYOUTS),
    ),
]
ExportMethod = Annotated[
    str,
    option("--method", panel=RANGES, metavar="METHOD", help="Of static ranges, as in calibrate."),
]
Tokenizer = Annotated[
    str | None,
    option(
        "--tokenizer",
        panel=DATA,
        metavar="DIR",
        show_default="beside the file",
        help="Folder with the tokenizer of an .onnx file that reads text.",
    ),
]
Seed = Annotated[
    int, option("--seed", panel=COMPUTED, metavar="N", help="Of the bootstrap resampling.")
]
Top = Annotated[
    int, option("--top", panel=OUTPUT, metavar="ROWS", help="Rows to show; the file has all.")
]
PATTERNS = "glob patterns on module names"
AllowUnseen = Annotated[
    str | None,
    option(
        "--allow-unseen",
        panel=COMPUTED,
        metavar="LIST",
        show_default="none",
        help=f"Modules that need not run, e.g. experts: {PATTERNS}.",
    ),
]
Out = Annotated[
    str | None,
    option(
        "--out",
        panel=OUTPUT,
        metavar="DIR",
        show_default="reports/<command>-<models>-<hash of the config>",
        help="Folder to write to; the same configuration goes on where it stopped.",
    ),
]
Force = Annotated[
    bool,
    option("--force", panel=OUTPUT, help="Replace what another configuration left in --out."),
]
Config = Annotated[
    str | None,
    option(
        "--config",
        panel=OUTPUT,
        metavar="FILE.toml",
        show_default="none",
        help="Options and arguments by their names; every run saves its own as config.toml. What "
        "is typed wins.",
        callback=read_config,
        is_eager=True,
        expose_value=False,
    ),
]
Json = Annotated[bool, option("--json", panel=OUTPUT, help="Print the result as JSON, to stdout.")]
Quiet = Annotated[
    bool, option("--quiet", "-q", panel=OUTPUT, help="No progress and no tables; errors only.")
]
