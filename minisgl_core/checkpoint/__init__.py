"""Reading weights: where tensors come from (``WeightSource``) and where they go (``WeightSlot``)."""

from .load import LoadReport, load_weights
from .slots import WeightSlot, WeightSource
from .source import head_is_tied, open_source

__all__ = ["LoadReport", "WeightSlot", "WeightSource", "head_is_tied", "load_weights", "open_source"]
