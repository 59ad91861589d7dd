"""Diagnoses unreadable files: an incomplete download, a Git LFS pointer, a web page."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Cause", "cause_of"]

_HEAD_BYTES: Final = 512
_LFS: Final = b"version https://git-lfs.github.com/spec/"


class Cause(NamedTuple):
    """What is wrong; ``problem`` completes "FILE ..."."""

    problem: str
    remedy: str


_SIGNS: Final[dict[bytes, Cause]] = {
    _LFS: Cause(
        "is a Git LFS pointer, which names the file but does not hold it",
        "run `git lfs pull` in the model's repository, or download the file itself",
    ),
    b"<!doctype": Cause("is a web page, not the file: the download was refused or redirected", "download it again"),
    b"<html": Cause("is a web page, not the file: the download was refused or redirected", "download it again"),
    b"<?xml": Cause("is an XML answer of a server, not the file", "download it again"),
    b'{"error"': Cause("is the error message of a server, not the file", "download it again"),
    b"PK\x03\x04": Cause("is a zip archive, such as PyTorch's own format", "give safetensors or GGUF"),
    b"\x80\x02": Cause("is a Python pickle", "give safetensors or GGUF"),
    b"\x1f\x8b": Cause("is compressed with gzip", "unpack it"),
    b"GGUF": Cause("is a GGUF file", "name it .gguf and give its path"),
}
"""First bytes of files of another kind, in lower case where case may vary."""


def cause_of(path: Path) -> Cause | None:
    """The likely reason why a file could not be read; None if unknown. Never raises."""
    if path.is_dir():
        return Cause("is a folder, not a file", "give the file in it")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if not head:
        return Cause("is empty: a download that never began, or a full disk", "download it again")
    if not any(head):
        return Cause("holds zeros: a download that reserved its space and stopped", "download it again")
    start = head.lstrip()
    return next((cause for sign, cause in _SIGNS.items() if start.startswith(sign) or _lower(start, sign)), None)


def _lower(start: bytes, sign: bytes) -> bool:
    return sign.startswith(b"<") and start.lower().startswith(sign)
