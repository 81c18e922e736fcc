"""Integer types of 2 to 16 bits, their limits and their names. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.errors import InputError

MIN_BITS, MAX_BITS = 2, 16

_NAME = re.compile(r"(u?)int([0-9]{1,2})(n?)")


@dataclass(frozen=True, kw_only=True)
class QType:
    """An integer type.

    `narrow` leaves out the lowest value of a signed type, so that the grid is symmetric about 0:
    `int4` is [-8, 7], `int4n` is [-7, 7]. An unsigned type has no narrow form.

    Raises:
        InputError: bits outside 2..16, or an unsigned narrow type.
    """

    bits: int
    signed: bool = True
    narrow: bool = False

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise InputError(f"An integer type has {MIN_BITS} to {MAX_BITS} bits, got {self.bits}.")
        if self.narrow and not self.signed:
            raise InputError(
                f"Only a signed type can be narrow, got uint{self.bits} narrow: drop one of them."
            )

    @property
    def qmin(self) -> int:
        """The lowest integer of the type; never above 0."""
        if not self.signed:
            return 0
        return int(self.narrow) - (1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """The highest integer of the type; never below 1."""
        return (1 << (self.bits - int(self.signed))) - 1

    @property
    def levels(self) -> int:
        """How many integers the type has."""
        return self.qmax - self.qmin + 1

    def __str__(self) -> str:
        return f"{'' if self.signed else 'u'}int{self.bits}{'n' if self.narrow else ''}"

    @classmethod
    def parse(cls, text: str) -> QType:
        """Returns the type called `text`, such as `int8`, `uint4` or `int6n`; inverse of `str`.

        Raises:
            InputError: not such a name, or no such type.
        """
        match = _NAME.fullmatch(text)
        if match is None or match[2].startswith("0"):
            raise InputError(
                f"Expected an integer type such as int8, uint4 or int6n (n: narrow), got {text!r}."
            )
        return cls(bits=int(match[2]), signed=not match[1], narrow=bool(match[3]))
