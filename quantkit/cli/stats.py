"""`quantkit stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.jobs import DEFAULT_TEXT, StatsJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import topk_text


def stats(
    model: options.Model,
    text: options.Text = DEFAULT_TEXT,
    seq_len: options.SeqLen = 512,
    samples: options.Samples = 64,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    count_masked: Annotated[
        bool,
        typer.Option("--count-masked", help='Count masked logits too: the paper\'s "all of QK^T".'),
    ] = False,
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the outliers of a model.

    Attention logits and hidden states, by layer, head and token class; writes stats.json.

    \b
    Examples:
      quantkit stats smollm2
      quantkit stats ./my-model --text corpus.txt --samples 16 --seq-len 1024
      quantkit stats ./my-model --json > stats.json
    """
    job = StatsJob(
        model=model,
        data=text,
        seq_len=seq_len,
        samples=samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        count_masked=count_masked,
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_stats

        return run_stats(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("stats", job),
        result="stats.json",
        view=topk_text,
        as_json=as_json,
        quiet=quiet,
    )
