"""Which packages a wheel has: those of quantkit/, and the folder calib/ as data of one of them.

A static list in pyproject.toml cannot place a folder elsewhere and find the others by itself.
"""

from setuptools import find_packages, setup

SHIPPED = "quantkit.calib_sets.shipped"

setup(
    packages=[*find_packages(include=["quantkit", "quantkit.*"]), SHIPPED],
    package_dir={SHIPPED: "calib"},
)
