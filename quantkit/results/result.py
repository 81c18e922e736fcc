"""What every result file has in common once it is read: where it lies, and how it is shown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Final, Self

_FOLDER: Final = "_folder"


class Result:
    """Base of the classes that are a whole file; it adds no field, so that no file says it.

    Equality, JSON and `dataclasses.replace` know nothing of the folder: a changed copy is no longer
    what a file says.
    """

    @property
    def folder(self) -> Path | None:
        """Folder of the file that it was read from; None where it was read from none."""
        found: Path | None = self.__dict__.get(_FOLDER)
        return found

    def in_folder(self, folder: Path) -> Self:
        """Returns it as what was read from a file of this folder."""
        found = copy.copy(self)
        object.__setattr__(found, _FOLDER, folder)  # frozen, and a copy of our own
        return found

    def __repr__(self) -> str:
        from quantkit.results.shown import shown

        place = "" if self.folder is None else f", {self.folder}"
        return f"<{type(self).__name__}: {shown(self).title}{place}>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from quantkit.results.notebook import html_of
        from quantkit.results.shown import shown

        return html_of(shown(self))
