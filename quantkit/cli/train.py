"""`quantkit train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.jobs import ARMS, PairSpec, TrainJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import training_text


def train(
    pair: Annotated[
        str,
        typer.Argument(
            metavar="PAIR.toml",
            show_default=False,
            help="What is trained, on what: see the README; or the name of a recipe that ships: "
            "pair, seeds.",
        ),
    ],
    arm: Annotated[
        str | None,
        typer.Option(
            "--arm",
            metavar="LIST",
            show_default="all of the file",
            help=f"Train these alone: {', '.join(ARMS)}. Another process may train the others in "
            "the same folder.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Computed on: cpu, cuda.")
    ] = "cpu",
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train matched models that differ in their attention alone.

    They have the same sizes, rows, order, seed and schedule, and share their initial weights.
    Writes a transformers folder for each arm and seed, curves.jsonl beside it, and training.json.
    Ctrl-C, and the same command goes on from the last checkpoint. With torchrun or accelerate
    launch several processes share each batch.

    \b
    Examples:
      quantkit train pair.toml
      quantkit train pair.toml --arm diff --out reports/my-pair
      torchrun --nproc-per-node 2 -m quantkit train pair.toml
      quantkit report reports/train-pair-*
    """
    job = TrainJob(
        pair=PairSpec.read(pair),
        device=device,
        arms=() if arm is None else options.words("arm", arm),
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_train

        return run_train(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("train", job),
        result="training.json",
        view=training_text,
        as_json=as_json,
        quiet=quiet,
    )
