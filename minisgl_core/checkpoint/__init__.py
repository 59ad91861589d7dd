"""Reading weights: where tensors come from (``WeightSource``) and where they go (``WeightSlot``)."""

from .slots import WeightSlot, WeightSource

__all__ = ["WeightSlot", "WeightSource"]
