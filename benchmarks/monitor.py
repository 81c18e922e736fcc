"""What the training monitor costs: the step time of a small Llama with and without it, in one run.

A Llama of 3.7 M parameters (4 layers, width 256, 4 heads, 2,048 tokens of vocabulary) trains on
random tokens, 4 sequences of 256 a step, with AdamW. Stretches of `--every` steps, one of which is
recorded, alternate with stretches without the monitor; which of a pair comes first alternates too.
Figures, each in wall time and in processor time:

* `ratio`: median over the pairs of monitored / plain time of a stretch;
* `recorded_step_ratio`: median recorded step / median plain step, steps in turn;
* `expected_ratio`: 1 + (recorded_step_ratio - 1) / every, what the ratio is where nothing else
  runs; it can be told from noise where the ratio cannot.

On a machine that others use, read the processor time of one thread (`--threads 1`).

    python benchmarks/monitor.py [--every 50] [--pairs 5] [--models llama,diffllama] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.monitoring import OutlierMonitor

OUT = Path(__file__).parent / "results" / "monitor.json"
BATCH, TOKENS, VOCAB = 4, 256, 2048
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "diffllama": (DiffLlamaForCausalLM, DiffLlamaConfig),
}
CLOCKS = ("wall", "processor")
Times = tuple[float, float]
"""Seconds on each of `CLOCKS`."""
CHECKED_STEPS = 25  # recorded and plain steps in turn, beside the stretches


def _make(name: str) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    return kind(
        config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
        )
    ).train()


def _measure(name: str, every: int, pairs: int, folder: Path) -> dict[str, Any]:
    """Returns one model's figures."""
    model = _make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = OutlierMonitor(model, folder / f"{name}.jsonl", every=every)
    generator = torch.Generator().manual_seed(1)
    unwatched = 1  # a number that `every` does not divide, nor does any other step of a stretch

    def step(number: int) -> Times:
        ids = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
        started = (time.perf_counter(), time.process_time())
        with monitor.step(number):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            monitor.note(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started[0], time.process_time() - started[1]

    def stretch(watched: bool) -> Times:
        times = [step(n if watched else unwatched) for n in range(every)]
        return sum(wall for wall, _ in times), sum(cpu for _, cpu in times)

    for number in (unwatched, 0, unwatched, 0):
        step(number)
    stretches = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {watched: stretch(watched) for watched in order}
        stretches.append({"plain": found[False], "monitored": found[True]})
        print(f"{name}: pair {pair + 1} of {pairs}: {stretches[-1]}", file=sys.stderr, flush=True)
    recorded, plain = [], []
    for _ in range(CHECKED_STEPS):
        plain.append(step(unwatched))
        recorded.append(step(0))
    row: dict[str, Any] = {
        "model": name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    for index, clock in enumerate(CLOCKS):
        plain_s = statistics.median(times[index] for times in plain)
        recorded_s = statistics.median(times[index] for times in recorded)
        row[clock] = {
            "ratio": statistics.median(
                s["monitored"][index] / s["plain"][index] for s in stretches
            ),
            "recorded_step_ratio": recorded_s / plain_s,
            "expected_ratio": 1 + (recorded_s / plain_s - 1) / every,
            "plain_step_s": plain_s,
            "recorded_step_s": recorded_s,
            "stretches_s": [{k: v[index] for k, v in s.items()} for s in stretches],
        }
    return row


def main() -> None:
    """Measures each model, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.every < 2:
        parser.error("--every must be at least 2: a stretch needs steps that are not recorded")
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            _measure(name, options.every, options.pairs, Path(folder))
            for name in options.models.split(",")
        ]
    plain = {
        "what": f"step time with the monitor / without, {BATCH} x {TOKENS} tokens a step, float32",
        "every": options.every,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "models": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    print(
        f"{'model':<10} {'time':<10} {'ratio':>7} {'expected':>9} {'recorded/plain':>15} {'ms':>7}"
    )
    for row in rows:
        for clock in CLOCKS:
            found = row[clock]
            print(
                f"{row['model']:<10} {clock:<10} {found['ratio']:>7.4f} "
                f"{found['expected_ratio']:>9.4f} {found['recorded_step_ratio']:>15.3f} "
                f"{1e3 * found['plain_step_s']:>7.1f}"
            )


if __name__ == "__main__":
    main()
