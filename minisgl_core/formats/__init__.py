"""File formats that several rooms read: JSON and the GGUF header. No torch."""

from .gguf import GGUFFile, GGUFTensor, find_gguf
from .jsonfile import read_json
from .wrong_file import Cause, cause_of

__all__ = ["Cause", "GGUFFile", "GGUFTensor", "cause_of", "find_gguf", "read_json"]
