"""`quantkit sensitivity`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from quantkit.cli import options
from quantkit.cli.console import run_job
from quantkit.cli.words import words
from quantkit.errors import InputError
from quantkit.jobs import DEFAULT_TEXT, SensitivityJob
from quantkit.jobs.sensitivity import GROUPS, MODES, TARGET_FRAC
from quantkit.reporting import sensitivity_text


def sensitivity(
    model: options.Model,
    ranges: Annotated[
        str,
        options.option(
            "--ranges",
            panel=options.RANGES,
            metavar="RUN",
            help="Folder of a calibrate or compare run of this model, with its ranges.json.",
        ),
    ],
    quantize: options.Quantize = "w8a8",
    eval_text: options.Eval = DEFAULT_TEXT,
    seq_len: options.SeqLen = 256,
    samples: options.Samples = 8,
    batch_size: options.BatchSize = 4,
    modes: Annotated[
        str,
        options.option(
            "--modes",
            panel=options.MEASURED,
            metavar="LIST",
            help="enable-one: what a unit costs alone; disable-one: what keeping it in float "
            "removes of the whole.",
        ),
    ] = ",".join(MODES),
    group: Annotated[
        str,
        options.option(
            "--group",
            panel=options.MEASURED,
            metavar="UNIT",
            help=f"What is switched together: {', '.join(GROUPS)}.",
        ),
    ] = GROUPS[0],
    weights: Annotated[
        bool,
        options.option(
            "--weights",
            panel=options.MEASURED,
            help="Switch weights one by one too, not only inputs and logits; module and layer "
            "switch theirs in any case.",
        ),
    ] = False,
    remaining: Annotated[
        float,
        options.option(
            "--remaining",
            panel=options.MEASURED,
            metavar="SHARE",
            help="Find the fewest units to keep in float after which less than this share of the "
            "whole error remains.",
        ),
    ] = TARGET_FRAC,
    top: options.Top = 20,
    allow_overlap: options.AllowOverlap = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Rank the tensors whose quantization costs most.

    Each is switched on alone in the float model, and off alone in the quantized one; the cost is
    the KL divergence from the float model's predictions on held-out text. Says how few to keep in
    higher precision; writes sensitivity.json.

    Examples:
      quantkit sensitivity smollm2 --ranges reports/calibrate-smollm2-0123456789
      quantkit sensitivity ./my-model --ranges RUN --quantize w8a8+logits6:head:static
      quantkit sensitivity ./my-model --ranges RUN --group module --eval heldout.txt --top 40
    """
    if top < 1:
        raise InputError(f"--top takes a whole number of at least 1, got {top}.")
    job = SensitivityJob(
        model=model,
        ranges=ranges,
        recipe=quantize,
        eval=eval_text,
        seq_len=seq_len,
        samples=samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        modes=words("modes", modes),
        group=group,
        weights=weights,
        target_frac=remaining,
        allow_overlap=allow_overlap,
        out=out,
        force=force,
    )

    run_job(
        "sensitivity",
        job,
        result="sensitivity.json",
        view=partial(sensitivity_text, top=top),
        as_json=as_json,
        quiet=quiet,
    )
