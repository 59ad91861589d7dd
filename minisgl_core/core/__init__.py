"""The records that travel through the engine: sampling parameters, a Req, a Batch of them, and the Context of a model.

Lengths of a Req, in tokens: ``cached_len`` have KV in the pool before this pass, ``device_len`` after it,
``extend_len`` is the difference.
"""

from .batch import Batch, ScoredRows
from .context import Context
from .req import Req, ReqTable
from .sampling_params import SamplingParams

__all__ = ["Batch", "Context", "Req", "ReqTable", "SamplingParams", "ScoredRows"]
