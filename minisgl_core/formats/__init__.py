"""File formats that several rooms read: JSON and the GGUF header. No torch."""

from .gguf import GGUFFile, GGUFTensor, find_gguf
from .jsonfile import read_json

__all__ = ["GGUFFile", "GGUFTensor", "find_gguf", "read_json"]
