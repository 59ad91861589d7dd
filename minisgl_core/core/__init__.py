"""The records that travel through the engine: sampling parameters, a Req, a Batch of them, and the Context of a model.

Lengths of a Req, in tokens: ``cached_len`` have KV in the pool before this pass, ``device_len`` after it,
``extend_len`` is the difference.

The names below are imported when they are first used: sampling parameters alone need no torch.
"""

TYPE_CHECKING = False  # as in the top package
if TYPE_CHECKING:
    from .batch import Batch, Req, ReqTable, ScoredRows
    from .context import Context
    from .sampling_params import SamplingParams

__all__ = ["Batch", "Context", "Req", "ReqTable", "SamplingParams", "ScoredRows"]

if not TYPE_CHECKING:  # type checkers would believe it of every name
    _MODULES = {
        "Batch": "batch",
        "Context": "context",
        "Req": "batch",
        "ReqTable": "batch",
        "SamplingParams": "sampling_params",
        "ScoredRows": "batch",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value  # asked once
        return value
