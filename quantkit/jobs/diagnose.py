"""`quantkit diagnose` as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import check_choice, check_positive
from quantkit.jobs.choices import BOS

MEASURED: Final = 128


@dataclass(frozen=True, kw_only=True)
class DiagnoseJob:
    """Where a quantized graph parts from its float graph, and which quantizer did it.

    Attributes:
        calib: Text, images, or arrays named after the graph's inputs; None: pydoc, for a graph that
            reads tokens.
        tokenizer: A folder with a tokenizer; None: the folders of the files, or above them.
        measure: Quantizers whose damage alone is measured, those with the largest local error.
        alone_samples: Samples that it is measured on.
    """

    float_graph: str
    quantized_graph: str
    calib: str | None = None
    tokenizer: str | None = None
    seq_len: int = 256
    samples: int = 8
    bos: str = "auto"
    measure: int = MEASURED
    alone_samples: int = 1
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_positive("seq-len", self.seq_len, least=2)
        check_positive("samples", self.samples)
        check_positive("measure", self.measure, least=0)
        check_positive("alone-samples", self.alone_samples)
        check_choice("bos", self.bos, BOS)
        for path in (self.float_graph, self.quantized_graph):
            if not path.lower().endswith(".onnx"):
                raise InputError(f"expected two .onnx files, the float one first; got {path!r}.")

    @property
    def models(self) -> tuple[str, ...]:
        """What the run is called after: the quantized file, or its folder where it is a `model`."""
        path = PurePath(self.quantized_graph)
        return (path.parent.name if path.stem == "model" and path.parent.name else path.stem,)
