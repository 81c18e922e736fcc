"""batches x probes x observers -> observations -> ranges, and what says whether to trust them.

observation.py   what is kept of one tensor (a monoid)
watch.py         probe callbacks -> observations
observe.py       the pass: resumes, shares batches among processes, stops when stable
recording.py     what a pass keeps; observations.safetensors
stability.py     how far ranges moved as samples were added
choose.py        observations -> ranges, without another pass
guards.py        what makes a range untrustworthy
smoothing.py     SmoothQuant scales of a model's groups
weights.py       ranges of weights, which need no pass; weights.safetensors
diagnose.py      observations -> calibration.json
"""

from quantkit.calibration.choose import RangePlan, choose_ranges, ranges_now
from quantkit.calibration.diagnose import diagnose
from quantkit.calibration.guards import failed_guards, require_trustworthy
from quantkit.calibration.observation import Observation
from quantkit.calibration.observe import forget, observe
from quantkit.calibration.recording import OBSERVATIONS_FILE, Recording, load, save
from quantkit.calibration.smoothing import find_smoothing
from quantkit.calibration.stability import is_stable, stability
from quantkit.calibration.weights import (
    WEIGHTS_FILE,
    WeightPlan,
    WeightRanges,
    choose_weight_ranges,
    load_weight_ranges,
    save_weight_ranges,
    weights_info,
)

__all__ = [
    "OBSERVATIONS_FILE",
    "WEIGHTS_FILE",
    "Observation",
    "RangePlan",
    "Recording",
    "WeightPlan",
    "WeightRanges",
    "choose_ranges",
    "choose_weight_ranges",
    "diagnose",
    "failed_guards",
    "find_smoothing",
    "forget",
    "is_stable",
    "load",
    "load_weight_ranges",
    "observe",
    "ranges_now",
    "require_trustworthy",
    "save",
    "save_weight_ranges",
    "stability",
    "weights_info",
]
