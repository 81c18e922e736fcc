"""A job as the config file that repeats it: which field of a job is which option, in one table.

schema = "quantkit.config/1"
command = "stats"
model = ["./my-model"]             # arguments by their names
seq-len = 256                      # options without their dashes

Every run saves one, as `config.toml`; `--config FILE.toml` reads it. A training run saves its
PAIR.toml instead, which is what `quantkit train` takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from quantkit.jobs.naming import Job
from quantkit.jobs.pair import PAIR_SCHEMA
from quantkit.jobs.train import TrainJob

CONFIG_FILE: Final = "config.toml"
CONFIG_SCHEMA: Final = "quantkit.config/1"
OPTIONS: Final = {
    "models": "model",
    "from_run": "from",
    "recipe": "quantize",
    "recipes": "quantize",
    "tasks": "task",
    "both_readings": "paper",
    "target_frac": "remaining",
}
"""Field of any job -> its option or argument; every other has its own name, with dashes."""
NOTHING: Final = "none"
"""What stands for an empty list, or for nothing, where leaving the option out means something."""
_NOT_SAVED: Final = ("force",)
"""Whether a folder may be replaced is decided anew each time."""


def option_of(field: str) -> str:
    """Returns the option, without its dashes, that says a field of a job."""
    return OPTIONS.get(field, field.replace("_", "-"))


def config_fields(command: str, job: Job) -> dict[str, Any]:
    """Returns what the config file of a job says: strings, numbers, booleans and lists of them.

    All that the job has is written, also what is a default now: another version's may differ.
    """
    if isinstance(job, TrainJob):
        return {"schema": PAIR_SCHEMA} | _without_none(dataclasses.asdict(job.pair))
    fields: dict[str, Any] = {"schema": CONFIG_SCHEMA, "command": command}
    for field in job.__dataclass_fields__.values():
        value = getattr(job, field.name)
        if field.name in _NOT_SAVED or (value in (None, ()) and value == field.default):
            continue
        if isinstance(value, tuple):
            value = list(value)
        fields[option_of(field.name)] = NOTHING if value in (None, []) else value
    return fields


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value, in tables too: TOML has no null."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _without_none(value)
        elif isinstance(value, list | tuple):
            found[name] = [_without_none(v) if isinstance(v, dict) else v for v in value]
        elif value is not None:
            found[name] = value
    return found
