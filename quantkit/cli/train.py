"""`quantkit train`."""

from __future__ import annotations

from typing import Annotated

from quantkit.cli import complete, options
from quantkit.cli.console import run_job
from quantkit.cli.words import words
from quantkit.jobs import ARMS, PairSpec, TrainJob
from quantkit.jobs.pair import RECIPES
from quantkit.reporting import training_text


def train(
    pair: Annotated[
        str,
        options.argument(
            "PAIR.toml",
            "What is trained, on what: see the README; or the name of a recipe that ships: "
            "pair, seeds.",
            autocompletion=complete.one_of(*RECIPES),
        ),
    ],
    arm: Annotated[
        str | None,
        options.option(
            "--arm",
            panel=options.COMPUTED,
            metavar="LIST",
            show_default="all of the file",
            help=f"Train these alone: {', '.join(ARMS)}. Another process may train the others in "
            "the same folder.",
        ),
    ] = None,
    device: Annotated[
        str,
        options.option(
            "--device", panel=options.COMPUTED, metavar="DEVICE", help="Computed on: cpu, cuda."
        ),
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

    Examples:
      quantkit train pair.toml
      quantkit train pair.toml --arm diff --out reports/my-pair
      torchrun --nproc-per-node 2 -m quantkit train pair.toml
      quantkit report reports/train-pair-*
    """
    job = TrainJob(
        pair=PairSpec.read(pair),
        device=device,
        arms=words("arm", arm),
        out=out,
        force=force,
    )

    run_job(
        "train",
        job,
        result="training.json",
        view=training_text,
        as_json=as_json,
        quiet=quiet,
    )
