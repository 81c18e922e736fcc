"""`quantkit stats`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from quantkit.cli import options
from quantkit.cli.console import run_job
from quantkit.cli.words import fractions, words
from quantkit.jobs import DEVICE_MAPS, STATS_POINTS, StatsJob
from quantkit.reporting import stats_text


def stats(
    model: options.Models,
    data: options.Data = None,
    seq_len: options.SeqLen = 512,
    samples: options.Samples = 64,
    batch_size: options.BatchSize = 4,
    rows: Annotated[
        int | None,
        options.option(
            "--rows",
            panel=options.MEASURED,
            metavar="ROWS",
            show_default="all",
            help="Query rows a sequence that enter median, kurtosis and entropy of attention; "
            "extremes and top-k are of all rows in any case. 0: these alone.",
        ),
    ] = None,
    points: Annotated[
        str | None,
        options.option(
            "--points",
            panel=options.MEASURED,
            metavar="LIST",
            show_default="all but linear_input",
            help=f"Beside logits and hidden states: {', '.join(STATS_POINTS[2:])}; or none.",
        ),
    ] = None,
    linear: Annotated[
        str | None,
        options.option(
            "--linear",
            panel=options.MEASURED,
            metavar="LIST",
            show_default="all",
            help=f"Measure the inputs of these linear layers: {options.PATTERNS}.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        options.option(
            "--layers",
            panel=options.MEASURED,
            metavar="LIST",
            show_default="those that are found",
            help=f"Whose outputs are the hidden states: {options.PATTERNS}.",
        ),
    ] = None,
    allow_unseen: options.AllowUnseen = None,
    quantiles: Annotated[
        str,
        options.option(
            "--quantiles",
            panel=options.MEASURED,
            metavar="LIST",
            help="Of |x|, as fractions, beside the median; or none.",
        ),
    ] = "0.99,0.999",
    count_masked: Annotated[
        bool,
        options.option(
            "--count-masked",
            panel=options.MEASURED,
            help='Count masked logits too: the paper\'s "all of QK^T".',
        ),
    ] = False,
    paper: Annotated[
        bool,
        options.option(
            "--paper",
            panel=options.MEASURED,
            help="Show the rows of the Differential Transformer paper too, and count all of QK^T "
            "beside the valid logits, as it does.",
        ),
    ] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    device_map: Annotated[
        str | None,
        options.option(
            "--device-map",
            panel=options.COMPUTED,
            metavar="MAP",
            show_default="off",
            help=f"{', '.join(DEVICE_MAPS)}: spread a model too large for one device over devices, "
            "memory and disk.",
        ),
    ] = None,
    max_memory: Annotated[
        str | None,
        options.option(
            "--max-memory",
            panel=options.COMPUTED,
            metavar="LIST",
            show_default="what is free",
            help="With --device-map, how much each device may hold: cpu=16GB,0=20GB (0: GPU 0); "
            "the rest stays on disk.",
        ),
    ] = None,
    bos: options.Bos = "auto",
    seed: Annotated[
        int,
        options.option(
            "--seed",
            panel=options.MEASURED,
            metavar="N",
            help="Of the choice of rows, with --rows.",
        ),
    ] = 0,
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the outliers of one or more models.

    Attention logits, hidden states and what goes into the MLPs, by layer, head and token class;
    writes stats.json (with several models: one in a folder of each). Several processes share the
    batches: torchrun --nproc-per-node 2 -m quantkit stats ...

    Examples:
      quantkit stats smollm2
      quantkit stats ./diff ./baseline --paper
      quantkit stats ./my-model --text corpus.txt --samples 16 --seq-len 8192 --rows 512
      quantkit stats dinov2-small --data ./photos
      quantkit stats smollm2 --points linear_input --linear "*.down_proj"
    """
    job = StatsJob(
        models=tuple(model),
        data=data,
        seq_len=seq_len,
        samples=samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        device_map=device_map,
        max_memory=words("max-memory", max_memory),
        bos=bos,
        count_masked=count_masked,
        both_readings=paper,
        points=None if points is None else words("points", points, may_be_none=True),
        quantiles=fractions("quantiles", quantiles),
        rows=rows,
        seed=seed,
        layers=words("layers", layers),
        linear=words("linear", linear),
        allow_unseen=words("allow-unseen", allow_unseen),
        out=out,
        force=force,
    )

    run_job(
        "stats",
        job,
        result="stats.json" if len(job.models) == 1 else None,
        view=partial(stats_text, paper=paper),
        as_json=as_json,
        quiet=quiet,
    )
