"""Opens a source of weights by path."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..formats import find_gguf
from .safetensors_source import open_safetensors
from .targets import WeightSource

__all__ = ["head_is_tied", "open_source"]

_CHUNK_ROWS = 4096


def open_source(path: str | Path) -> WeightSource:
    """Open the weights at ``path``: a folder with safetensors, a .gguf file, or a folder with one.

    Raises :class:`~minisgl_core.errors.CheckpointError` if there are none in a supported format, or a shard is missing.
    """
    path = Path(path)
    file = find_gguf(path)
    if file is not None:
        from .gguf_source import GGUFSource

        return GGUFSource(file)
    source = open_safetensors(path)
    if source is None:
        others = sorted(item.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for item in path.glob(pattern))
        raise CheckpointError(
            f"no safetensors found in {str(path)!r}" + (f", only {', '.join(others)}" if others else ""),
            field="model",
            value=str(path),
            remedy="download the safetensors files, or convert the model with transformers' save_pretrained",
        )
    return source


def head_is_tied(source: WeightSource, tie_word_embeddings: bool) -> bool:
    """True if the output head shares the weights of the embedding.

    That is so without ``lm_head.weight`` in the checkpoint. With both, the config decides, unless the tensors differ:
    then the checkpoint has a separate head, which must be used.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in source.names():
        return True
    if not tie_word_embeddings or source.shape(head) != source.shape(embedding):
        return False
    rows = source.shape(head)[0]
    for start in range(0, rows, _CHUNK_ROWS):
        part = (slice(start, min(start + _CHUNK_ROWS, rows)), slice(None))
        if not source.read(head, part).equal(source.read(embedding, part)):
            return False
    return True
