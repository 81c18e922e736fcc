"""Writes two BIG-bench tasks in HellaSwag's fields, and measures SmolLM2 on them.

`goal_step_wikihow/step_inference` and `social_iqa` (Srivastava et al. 2022, "Beyond the Imitation
Game") are streamed out of the source archive of the package bigbench, and checked by their hashes:

    pip download --no-deps --no-binary :all: bigbench==1.0.0
    python benchmarks/bigbench.py --archive bigbench-1.0.0.tar.gz [--measure ITEMS]
    quantkit sweep smollm2 --task multiple-choice=benchmarks/data/step_inference.jsonl ...

The prompt is the task's own: its prefixes where it gives them, else none; the choices are not part
of it. The files stay on this machine: git ignores their folder, as BIG-bench asks that its items
never get into a training corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tarfile
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "data"
ROOT = "bigbench-1.0.0/bigbench/benchmark_tasks"
FILES = {
    "goal_step_wikihow/step_inference": (
        "e3cba757d9f6050a90f4a9d7b32d0159f2c0d69a4b6656588f56593f85193494"
    ),
    "social_iqa": "edc9f568b70ae6d4af0783764dbe4e4f18aa1242c675a93f534338d73a565348",
}


def tasks_in(archive: Path) -> dict[str, dict[str, Any]]:
    """Returns the tasks by name; the archive is read up to the last of them."""
    found: dict[str, dict[str, Any]] = {}
    wanted = {f"{ROOT}/{name}/task.json": name for name in FILES}
    with tarfile.open(archive, "r|gz") as stream:
        for member in stream:
            name = wanted.get(member.name)
            if name is None:
                continue
            data = stream.extractfile(member).read()  # type: ignore[union-attr]
            digest = hashlib.sha256(data).hexdigest()
            if digest != FILES[name]:
                raise SystemExit(f"{member.name} has sha256 {digest}: expected {FILES[name]}.")
            found[name] = json.loads(data)
            if len(found) == len(FILES):
                return found
    raise SystemExit(f"{archive.name} lacks {', '.join(sorted(set(FILES) - set(found)))}.")


def rows_of(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the items with one right ending."""
    before = task.get("task_prefix", "") + task.get("example_input_prefix", "")
    after = task.get("example_output_prefix", "")
    rows = []
    for example in task["examples"]:
        scores = example["target_scores"]
        right = [index for index, score in enumerate(scores.values()) if score == 1]
        if len(right) == 1 and len(scores) > 1:
            ctx = before + example["input"] + after
            rows.append({"ctx": ctx, "endings": list(scores), "label": right[0]})
    return rows


def measured(path: Path, items: int) -> dict[str, Any]:
    """Returns SmolLM2's accuracies on items of a file, with plain forward passes."""
    import numpy as np
    import torch

    from quantkit.calib_sets import TokenBatch
    from quantkit.jobs.tasks import MultipleChoiceSpec
    from quantkit.models import load
    from quantkit.tasks.multiple_choice import MultipleChoice

    loaded = load("smollm2")

    def forward(batch: TokenBatch, positions: torch.Tensor | None = None) -> torch.Tensor:
        asked = {} if positions is None else {"logits_to_keep": positions}
        logits: torch.Tensor = loaded.model(**batch.inputs, use_cache=False, **asked).logits
        return logits

    spec = MultipleChoiceSpec(source=str(path))
    task = MultipleChoice.of(spec, loaded.tokenizer, text_source="", items=items, batch_size=16)
    rows = np.zeros((len(task.items), 2))
    start = time.perf_counter()
    for batch in task.batches:
        rows[list(batch)] = task.run(forward, batch)
    metrics = task.scores(rows).metrics
    return {metric.name: metric.value for metric in metrics} | {
        "chance": metrics[0].chance,
        "items": len(rows),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Writes the files and prints what is measured on them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--archive", type=Path, required=True, help="bigbench-1.0.0.tar.gz")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--measure", type=int, default=0, metavar="ITEMS")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, task in tasks_in(options.archive).items():
        rows = rows_of(task)
        path = options.out / f"{name.rpartition('/')[2]}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} of {len(task['examples'])} items have one right ending")
        if options.measure:
            print(f"  {measured(path, options.measure)}")


if __name__ == "__main__":
    main()
