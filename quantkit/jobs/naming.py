"""What any job is: its configuration's hash, and the folder that it writes to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

NOT_CONFIG: Final = frozenset({"out", "force", "arms"})
"""Fields that say where the result goes or who makes which part of it, not what it is."""


class Job(Protocol):
    """Any of the jobs below."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def out(self) -> str | None: ...

    @property
    def force(self) -> bool: ...


def config_hash(job: Job) -> str:
    """Returns ten hex digits of the job's configuration: every field but where it is written."""
    names = sorted(name for name in job.__dataclass_fields__ if name not in NOT_CONFIG)
    config = {name: getattr(job, name) for name in names}
    text = json.dumps(
        [type(job).__name__, config],
        sort_keys=True,
        ensure_ascii=True,
        default=dataclasses.asdict,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def default_out(command: str, job: Job) -> Path:
    """Returns `--out` where it was given, else `reports/<command>-<models>-<hash>`."""
    if job.out is not None:
        return Path(job.out)
    models = getattr(job, "models", None) or (_only_model(job),)
    label = "-".join(_slug(model) for model in models)[:60].strip("-.")
    return Path("reports") / f"{command}-{label}-{config_hash(job)}"


def _only_model(job: Job) -> str:
    """Returns what a job of one model is called after: the model, or the run that it goes on."""
    for name in ("model", "from_run"):
        found = getattr(job, name, None)
        if found is not None:
            return str(found)
    return "model"


def _slug(model: str) -> str:
    """Returns the last part of a path or hub id, in characters every file system has."""
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.") or "model"
