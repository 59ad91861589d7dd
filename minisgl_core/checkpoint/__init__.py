"""Loading weights: sources of tensors (``WeightSource``) and the storage that receives them (``WeightTarget``)."""

from .load import LoadReport, load_weights
from .source import head_is_tied, open_source
from .targets import WeightSource, WeightTarget

__all__ = ["LoadReport", "WeightSource", "WeightTarget", "head_is_tied", "load_weights", "open_source"]
