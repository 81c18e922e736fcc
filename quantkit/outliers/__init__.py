"""Outlier statistics: batches x probes x observers -> `Stats`."""

from quantkit.outliers.collect import collect
from quantkit.outliers.session import Session, record

__all__ = ["Session", "collect", "record"]
