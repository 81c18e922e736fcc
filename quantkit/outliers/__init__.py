"""Outlier statistics: batches x probes x observers -> `Stats`."""

from quantkit.outliers.collect import collect

__all__ = ["collect"]
