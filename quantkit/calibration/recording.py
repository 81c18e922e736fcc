"""`Recording`: everything a calibration pass keeps, and `observations.safetensors`.

The file of a finished pass serves to choose other ranges without a forward pass; that of a process
which was interrupted (`observations.part-RANK-of-COUNT.safetensors`) to go on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.calibration.observation import Observation
from quantkit.calibration.tensor_file import read_tensors, write_tensors
from quantkit.errors import InputError
from quantkit.probes.hits import HitCounts, add_counts

OBSERVATIONS_FILE: Final = "observations.safetensors"
OBSERVATIONS_SCHEMA: Final = "quantkit.observations/1"


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The ranges that would be chosen after so many samples.

    Attributes:
        ranges: By tensor (lo, hi), float32 `[groups]`.
    """

    samples: int
    ranges: dict[str, tuple[Tensor, Tensor]]


@dataclass
class Recording:
    """What one process has recorded so far, or all of them together.

    Attributes:
        seen: By tensor; linear layers that share an input share the object.
        batches: Batches of the slice that were done, or left to other processes.
        samples: Samples in them.
        hits: What the probes counted; `notes`: what they said.
        checkpoints: At growing sample counts; kept by the first process.
    """

    seen: dict[str, Observation] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0
    hits: HitCounts = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def add_hits(self, hits: HitCounts) -> None:
        """Adds what a probe or another process counted."""
        add_counts(self.hits, hits)

    def absorb(self, other: Recording) -> None:
        """Adds what another process recorded of other batches."""
        merged: dict[tuple[int, int], Observation] = {}
        for name, new in other.seen.items():
            before = self.seen.get(name)
            key = (id(before), id(new))
            if key not in merged:
                merged[key] = new if before is None else before.merge(new)
            self.seen[name] = merged[key]
        self.add_hits(other.hits)
        self.notes += [note for note in other.notes if note not in self.notes]


def save(path: Path, recording: Recording, identity: dict[str, Any]) -> None:
    """Writes the file whole or not at all.

    Args:
        identity: Plain data that says which model, data and options these are.

    Raises:
        InputError: the folder cannot be written to.
    """
    numbers: dict[int, int] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, int] = {}
    kinds: list[list[str]] = []
    for name, observation in recording.seen.items():
        number = numbers.setdefault(id(observation), len(numbers))
        names[name] = number
        if number == len(kinds):
            kinds.append([observation.point, observation.granularity])
            state = observation.state()
            tensors |= {f"{number}|{key}": x for key, x in state.items()}
    for index, point in enumerate(recording.checkpoints):
        for name, (lo, hi) in point.ranges.items():
            tensors[f"checkpoint {index}|{name}"] = torch.stack([lo, hi])
    plain = {
        "schema": OBSERVATIONS_SCHEMA,
        "identity": identity,
        "names": names,
        "kinds": kinds,
        "batches": recording.batches,
        "samples": recording.samples,
        "hits": recording.hits,
        "notes": recording.notes,
        "checkpoints": [point.samples for point in recording.checkpoints],
    }
    write_tensors(path, tensors, plain)


def load(path: Path) -> tuple[Recording, dict[str, Any]]:
    """Returns what `save` wrote, and its identity.

    Raises:
        InputError: no such file, one that is cut short, damaged, or of another version.
    """
    if not path.is_file():
        raise InputError(f"no such file: {path}; expected the observations of a calibration.")
    again = "calibrate again, or remove the file"
    tensors, plain = read_tensors(path, OBSERVATIONS_SCHEMA, again)
    try:
        return _recording(plain, tensors), plain["identity"]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"{path} is damaged ({error!r:.80}): {again}.") from error


def _recording(plain: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    states: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        owner, _, rest = key.partition("|")
        states.setdefault(owner, {})[rest] = x
    observations = [
        Observation.from_state(point, granularity, states[str(number)])
        for number, (point, granularity) in enumerate(plain["kinds"])
    ]
    checkpoints = []
    for index, samples in enumerate(plain["checkpoints"]):
        ranges = states.get(f"checkpoint {index}", {})
        checkpoints.append(
            Checkpoint(samples=samples, ranges={name: (x[0], x[1]) for name, x in ranges.items()})
        )
    return Recording(
        seen={name: observations[number] for name, number in plain["names"].items()},
        batches=plain["batches"],
        samples=plain["samples"],
        hits={
            point: {name: (calls, elements) for name, (calls, elements) in modules.items()}
            for point, modules in plain["hits"].items()
        },
        notes=plain["notes"],
        checkpoints=checkpoints,
    )
