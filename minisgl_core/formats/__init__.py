"""Readers of file formats that several packages share: JSON and the GGUF header. Imports no torch."""

from .gguf import GGUFFile, GGUFTensor, find_gguf
from .jsonfile import read_json
from .wrong_file import Cause, cause_of

__all__ = ["Cause", "GGUFFile", "GGUFTensor", "cause_of", "find_gguf", "read_json"]
