"""minisgl: a serving engine for Hugging Face language models whose kernels are plugins.

The names below are imported when they are first used: ``import minisgl_core`` alone loads no torch.
"""

TYPE_CHECKING = False  # typing's own would cost more than all the rest of this import
if TYPE_CHECKING:
    from .core import SamplingParams
    from .llm import LLM, AsyncLLM, Completion

__all__ = ["LLM", "AsyncLLM", "Completion", "SamplingParams", "__version__"]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # type checkers would believe it of every name
    _MODULES = {"LLM": "llm", "AsyncLLM": "llm", "Completion": "llm", "SamplingParams": "core"}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
