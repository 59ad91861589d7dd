"""Output files: checked before the work whose result they will hold, and written atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .errors import UsageError

__all__ = ["require_writable_file", "require_writable_folder", "write_whole"]

_ANOTHER_FILE: Final = "name a file in a folder that you may write to"
_ANOTHER_FOLDER: Final = "name a folder that you may write to"


def require_writable_folder(folder: Path, what: str, *, field: str, remedy: str = _ANOTHER_FOLDER) -> None:
    """Create the folder if necessary and write a test file in it. ``what`` describes what will be stored there.

    Raises :class:`UsageError` about ``field`` if the folder cannot be created or written to.
    """
    with _refusing(f"{what} cannot be written to {str(folder)!r}", folder, field, remedy):
        _try_folder(folder)


def require_writable_file(path: Path, what: str, *, field: str) -> None:
    """Check that a file can be written; it need not exist and is not changed. ``what`` precedes its path in the
    message.

    Raises :class:`UsageError` for a folder, a device, and a read-only file.
    """
    # Replacing a read-only file would be possible, but its owner made it read-only on purpose.
    with _refusing(f"{what} {path} cannot be written", path, field, _ANOTHER_FILE):
        _try_file(path)


def write_whole(path: Path, text: str, what: str, *, field: str) -> None:
    """Write a temporary file and rename it, so that a reader finds either the old or the new content. Links are kept.

    Raises :class:`UsageError` like :func:`require_writable_file`, and if the disk is full.
    """
    with _refusing(f"{what} {path} cannot be written", path, field, _ANOTHER_FILE):
        target = _try_file(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _refusing(message: str, path: Path, field: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{message}: {why}", field=field, value=str(path), remedy=remedy) from error


def _try_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():  # mkdir would say that it exists
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _try_file(path: Path) -> Path:
    """Check one file and return it, with links resolved."""
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise OSError(f"it is {'a folder' if path.is_dir() else 'no regular file'}")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only")
    target = Path(os.path.realpath(path))
    _try_folder(target.parent)
    return target
