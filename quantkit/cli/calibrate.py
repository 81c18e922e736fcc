"""`quantkit calibrate`."""

from __future__ import annotations

from typing import Annotated

from quantkit.cli import complete, options
from quantkit.cli.console import run_job
from quantkit.cli.words import share, whole_numbers, words
from quantkit.jobs import (
    CALIBRATION_POINTS,
    DEFAULT_CALIBRATION_POINTS,
    DEFAULT_EVAL_SAMPLES,
    DEFAULT_SAMPLES,
    DEFAULT_WEIGHT_BITS,
    DEFAULT_WEIGHT_METHOD,
    GUARDS,
    KV_CACHE,
    METHODS,
    RANGE_GRANULARITIES,
    UNTIL_STABLE_SAMPLES,
    WEIGHT_METHODS,
    CalibrateJob,
)
from quantkit.reporting import calibration_text


def calibrate(
    model: Annotated[
        str | None,
        options.argument(
            "[MODEL]",
            f"{options.MODEL_WORDS}. Left out with --from.",
            autocompletion=complete.models,
        ),
    ] = None,
    from_run: Annotated[
        str | None,
        options.option(
            "--from",
            panel=options.DATA,
            metavar="RUN",
            show_default="none",
            help="Choose ranges again, by another method or for other widths, from what an earlier "
            "run observed: no forward pass; no model, but with --weights.",
        ),
    ] = None,
    calib: options.Data = None,
    seq_len: options.SeqLen = 512,
    samples: Annotated[
        int | None,
        options.option(
            "--samples",
            panel=options.DATA,
            metavar="BLOCKS",
            show_default=f"{DEFAULT_SAMPLES}; {UNTIL_STABLE_SAMPLES} with --until-stable",
            help="Blocks that are read, at most. With --until-stable a shorter text keeps its last "
            f"{DEFAULT_EVAL_SAMPLES} for evaluation.",
        ),
    ] = None,
    until_stable: Annotated[
        str | None,
        options.option(
            "--until-stable",
            panel=options.DATA,
            metavar="SHARE",
            show_default="off",
            help="Go on until no range moved by more than this share of itself, e.g. 1%, over the "
            "last quarter of the samples.",
        ),
    ] = None,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    method: Annotated[
        str,
        options.option(
            "--method",
            panel=options.RANGES,
            metavar="NAME",
            help=f"How ranges are chosen: {', '.join(METHODS)}; a percentile takes a number, as "
            "upper-percentile:99.9 (two-sided cuts as much at either end). For single points: "
            "mse,attention_logit=minmax.",
        ),
    ] = "minmax",
    bits: Annotated[
        str,
        options.option(
            "--bits",
            panel=options.RANGES,
            metavar="LIST",
            help="Widths that ranges are chosen for, 2 to 16; the report's figures are for the "
            "first.",
        ),
    ] = "8",
    points: Annotated[
        str | None,
        options.option(
            "--points",
            panel=options.RANGES,
            metavar="LIST",
            show_default=",".join(DEFAULT_CALIBRATION_POINTS),
            help=f"What gets ranges: {', '.join(CALIBRATION_POINTS)}; {KV_CACHE} is "
            "attention_key,attention_value.",
        ),
    ] = None,
    symmetric: Annotated[
        str,
        options.option(
            "--symmetric",
            panel=options.RANGES,
            metavar="LIST",
            help="Points whose grid is symmetric, or none; the others' is asymmetric.",
        ),
    ] = "attention_logit",
    granularity: Annotated[
        str,
        options.option(
            "--granularity",
            panel=options.RANGES,
            metavar="NAME",
            help="Of what attention holds: a range a "
            f"{' or a '.join(RANGE_GRANULARITIES)} (a layer and map).",
        ),
    ] = "head",
    exclude_first: Annotated[
        bool,
        options.option(
            "--exclude-first",
            panel=options.RANGES,
            help="Leave the first token of each sequence out of every range: its values saturate.",
        ),
    ] = False,
    smooth: Annotated[
        str | None,
        options.option(
            "--smooth",
            panel=options.RANGES,
            metavar="ALPHA",
            show_default="off",
            help="Migrate scales from inputs to weights first (SmoothQuant): auto searches the "
            "strength of each group, or a number from 0 to 1.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        options.option(
            "--weights",
            panel="Ranges of weights",
            metavar="GRANULARITY",
            show_default="none",
            help="Give weights of linear layers ranges too: one a channel, or one a group:N of "
            "inputs. With none, recipes take the absmax of each output channel.",
        ),
    ] = None,
    weight_method: Annotated[
        str,
        options.option(
            "--weight-method",
            panel="Ranges of weights",
            metavar="NAME",
            help=f"How those are chosen: {', '.join(WEIGHT_METHODS)}. Judged on the weights alone: "
            "below 8 bits compare with minmax in a sweep.",
        ),
    ] = DEFAULT_WEIGHT_METHOD,
    weight_bits: Annotated[
        int,
        options.option(
            "--weight-bits",
            panel="Ranges of weights",
            metavar="BITS",
            help="Width that those are chosen for, 2 to 16.",
        ),
    ] = DEFAULT_WEIGHT_BITS,
    allow: Annotated[
        str | None,
        options.option(
            "--allow",
            panel=options.RANGES,
            metavar="LIST",
            show_default="none",
            help=f"Guards that may fail, which is recorded: {', '.join(GUARDS)}.",
        ),
    ] = None,
    allow_unseen: options.AllowUnseen = None,
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fix quantization ranges, and say whether to trust them.

    Writes ranges.json, calibration.json (what quantkit report draws) and observations.safetensors
    (what --from reads); with --weights also weights.safetensors. Ctrl-C and the same command: it
    goes on after the last finished batch.

    Examples:
      quantkit calibrate smollm2 --calib pydoc
      quantkit calibrate ./my-model --calib corpus.txt --method mse --bits 8,4
      quantkit calibrate ./my-model --until-stable 1%
      quantkit calibrate --from reports/calibrate-my-model-0123456789 --method mse
      quantkit calibrate smollm2 --smooth auto --out reports/smooth
      quantkit calibrate smollm2 --weights group:64 --weight-bits 4
    """
    job = CalibrateJob(
        model=model,
        from_run=from_run,
        calib=calib,
        seq_len=seq_len,
        samples=samples,
        until_stable=None if until_stable is None else share("until-stable", until_stable),
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        method=method,
        bits=whole_numbers("bits", bits),
        points=None if points is None else _points("points", points),
        symmetric=_points("symmetric", symmetric),
        granularity=granularity,
        exclude_first=exclude_first,
        smooth=smooth,
        weights=weights,
        weight_method=weight_method,
        weight_bits=weight_bits,
        allow=words("allow", allow),
        allow_unseen=words("allow-unseen", allow_unseen),
        out=out,
        force=force,
    )

    run_job(
        "calibrate",
        job,
        result="ranges.json",
        view=calibration_text,
        as_json=as_json,
        quiet=quiet,
    )


def _points(option: str, text: str) -> tuple[str, ...]:
    """Returns the points, with those that a KV cache holds in the place of its name."""
    found: list[str] = []
    for word in words(option, text, may_be_none=True):
        names = ("attention_key", "attention_value") if word == KV_CACHE else (word,)
        found += [name for name in names if name not in found]
    return tuple(found)
