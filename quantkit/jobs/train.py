"""`quantkit train` as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import check_choice
from quantkit.jobs.pair import PairSpec

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A pair to be trained.

    Attributes:
        arms: Those that this process trains; all where empty. The others' may be trained by another
            process at the same time, in the same folder.
        force: Replaces what is in the folder; not with `arms`, since the others' would go too.
    """

    pair: PairSpec
    device: str = "cpu"
    arms: tuple[str, ...] = ()
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        if self.force and self.arms:
            raise InputError(
                "--force with --arm would also remove the arms that are not named: give one of the "
                "two, or another --out."
            )
        for arm in self.arms:
            if arm not in self.pair.arms:
                raise InputError(
                    f"--arm {arm}: the pair {self.pair.name} has {', '.join(self.pair.arms)}; "
                    "expected one of them."
                )

    @property
    def models(self) -> tuple[str, ...]:
        """What the run's folder is called after."""
        return (self.pair.name,)
