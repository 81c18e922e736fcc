"""Puts a finished training into the package: `python benchmarks/ship_pair.py PAIR SEEDS SWEEP`.

PAIR and SEEDS are folders of `quantkit train pair` and `quantkit train seeds`, SWEEP is one of a
`quantkit sweep` of the seeds' models. Of PAIR the models and `training.json` are copied, of the two
others the results alone.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from quantkit.models.shipped import pair_folder
from quantkit.results import TrainingResult, read_json, write_json

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json")  # fmt: skip


def main(pair: Path, seeds: Path, sweep: Path) -> None:
    """Copies; what was in the package before is replaced file by file."""
    target = pair_folder()
    trained = read_json(pair / "training.json", TrainingResult)
    unfinished = [model.arm for model in trained.models if not model.finished]
    if unfinished or len(trained.models) != 2:
        sys.exit(f"{pair}: expected two finished models, unfinished are {unfinished}")
    models = []
    for model in trained.models:
        folder = target / model.arm
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (pair / model.folder / name).is_file():
                shutil.copyfile(pair / model.folder / name, folder / name)
        models.append(dataclasses.replace(model, folder=model.arm))
    write_json(target / "training.json", dataclasses.replace(trained, models=models))
    shutil.copyfile(seeds / "training.json", target / "training-seeds.json")
    shutil.copyfile(sweep / "sweep.json", target / "sweep-seeds.json")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
