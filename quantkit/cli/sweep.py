"""`quantkit sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage, watching
from quantkit.jobs import DEFAULT_TEXT, SweepJob, default_out
from quantkit.processes import may_talk
from quantkit.progress import Progress
from quantkit.reporting import plan_text, sweep_text
from quantkit.results import dumps

_LABELS = "LABEL=MODEL names one; models with one label are seeds of one model."
_WORDS = (
    "Other recipes to measure beside, a comma between; parts of one are joined by +, options "
    "follow a colon: w4:group64, w8a8 (static: needs --ranges), w8a8:token (does not), nf4, fp4, "
    "llm-int8, qk8, probs8, kv4, logits8:head:static. The float row is always measured. The "
    "grammar stands in the README."
)


def sweep(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help=f"One or more models. {options.MODEL_WORDS}. {_LABELS}",
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="LIST",
            help="What is measured: perplexity, multiple-choice[=FILE.jsonl], "
            "needles[:needles=N:queries=N:tokens=N:depths=A/B], icl[:labels=N:shots=N:orders=N], "
            "lm-eval=TASK, image-classification=FOLDER. Defaults: 4 needles, 2 of them asked; 4 "
            "labels, 32 shots, 5 orders.",
        ),
    ] = "perplexity",
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    range_: Annotated[
        str,
        typer.Option(
            "--range",
            metavar="LIST",
            help="Of the bits of the logits: dynamic (of the call), static (of --ranges; not for "
            "row).",
        ),
    ] = "dynamic",
    grid: Annotated[
        str,
        typer.Option(
            "--grid", metavar="LIST", help="Of the bits of the logits: symmetric, asymmetric."
        ),
    ] = "symmetric",
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="LIST",
            show_default=False,
            help=_WORDS,
        ),
    ] = None,
    ranges: Annotated[
        str | None,
        typer.Option(
            "--ranges",
            metavar="LIST",
            show_default=False,
            help="Folders of calibrate or compare runs, one for each model: their ranges and their "
            "smoothing are taken.",
        ),
    ] = None,
    keep: options.Keep = None,
    eval_text: options.Eval = DEFAULT_TEXT,
    allow_overlap: options.AllowOverlap = False,
    calib: options.Calib = DEFAULT_TEXT,
    calib_samples: options.CalibSamples = 128,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len", metavar="N", help="Tokens a block, and of the longest generated prompt."
        ),
    ] = 512,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Blocks of the perplexity, at most.")
    ] = 64,
    items: Annotated[
        int, typer.Option("--items", metavar="N", help="Items of every other task, at most.")
    ] = 200,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="Of generated and drawn items, and of the bootstrap."
        ),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would run and about how long it takes, which needs the models and a "
            "short run of each recipe; write nothing.",
        ),
    ] = False,
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what each bit costs, in the tasks that matter.

    Models stand side by side, on the same items; writes sweep.json. Every cell (model, recipe,
    task) is kept when it ends: Ctrl-C and the same command goes on.

    \b
    Examples:
      quantkit sweep smollm2 --samples 8
      quantkit sweep ./baseline ./diff --bits 16,8,6,4 --granularity tensor,head
      quantkit sweep smollm2 --task perplexity,multiple-choice --items 100 --dry-run
      quantkit sweep ./my-model --eval heldout.txt --json
      quantkit sweep ./my-model --bits 16 --quantize w8a8:token,nf4,kv4,qk8:smooth
      quantkit sweep ./my-model --ranges reports/my-ranges --quantize w8a8,w8a16
      quantkit sweep diff=./seed0/diff diff=./seed1/diff base=./seed0/base
    """
    job = SweepJob(
        models=tuple(models),
        tasks=options.words("task", task),
        eval=eval_text,
        calib=calib,
        recipes=() if quantize is None else options.words("quantize", quantize),
        ranges=() if ranges is None else options.words("ranges", ranges),
        keep=() if keep is None else options.words("keep", keep),
        allow_overlap=allow_overlap,
        bits=options.whole_numbers("bits", bits),
        granularity=options.words("granularity", granularity),
        range=options.words("range", range_),
        grid=options.words("grid", grid),
        seq_len=seq_len,
        samples=samples,
        items=items,
        calib_samples=calib_samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        seed=seed,
        out=out,
        force=force,
    )
    if dry_run:
        from quantkit.pipelines import plan_sweep

        if not may_talk():  # of several processes one plans
            return
        with watching(quiet) as progress:
            plan = plan_sweep(job, progress=progress)
        typer.echo(dumps(plan) if as_json else plan_text(plan), nl=False)
        return

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_sweep

        return run_sweep(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("sweep", job),
        result="sweep.json",
        view=sweep_text,
        as_json=as_json,
        quiet=quiet,
    )
