"""For plugins that compile sources of their own on the user's machine: with what, and where the result is kept."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError

from .spec import CannotRun, Reason

__all__ = ["cache_dir", "compile_once", "find_compiled", "host_compiler", "no_room"]

_CANDIDATES: Final = ("g++", "c++", "clang++")
_ROOM: Final = 16 << 20
"""Bytes that a folder must have free: objects and libraries of a plugin take far less."""
_NO_ROOM: Final = "no-room"
_SAID_OF_FULL_DISKS: Final = ("no space left", "quota exceeded", "file too large", "file size limit")


def cache_dir(plugin: str) -> Path:
    """The folder of a plugin in the user's cache, wherever ``MINISGL_CACHE_DIR`` puts that. It may not exist yet."""
    return ENV.CACHE_DIR.value / plugin


def host_compiler() -> tuple[str, ...]:
    """The C++ compiler with its first arguments: those of ``$CXX``, else the first of g++, c++, clang++ on PATH.

    Raises :class:`ConfigError` for a CXX that is no program, and :class:`CannotRun` where there is no compiler.
    """
    text = os.environ.get("CXX", "")
    if text.strip():
        return _named_compiler(text)
    for name in _CANDIDATES:
        if shutil.which(name):
            return (name,)
    raise CannotRun(
        Reason("no-compiler", "C++ compiler", " or ".join(_CANDIDATES), "none on PATH", "install g++, or set CXX")
    )


def _named_compiler(text: str) -> tuple[str, ...]:
    try:
        command = tuple(shlex.split(text))
    except ValueError:  # a quotation without an end
        command = ()
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(
            f"CXX is {text!r}, which is no program that can be run",
            field="CXX",
            value=text,
            remedy="set it to a C++ compiler, or unset it",
        )
    return command


def find_compiled(folder: Path, pattern: str) -> Path | None:
    """The newest file of such a name that :func:`compile_once` has made for ``folder``, in any process."""
    places = [folder]
    if _is_private(_temporary_home()):
        places.append(_temporary_home() / folder.name)
    found = [path for place in places for path in place.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def no_room(said: str) -> Reason | None:
    """The reason where a compiler has ``said`` that a disk is full; None if it has not."""
    if not any(words in said.lower() for words in _SAID_OF_FULL_DISKS):
        return None
    fix = f"make room in the cache folder and in {_temporary_home().parent}; MINISGL_CACHE_DIR and TMPDIR name others"
    return Reason(_NO_ROOM, "disk", "room to compile", f"a disk is full: {said[:200]}", fix)


def compile_once(folder: Path, name: str, make: Callable[[Path], None], what: str = "") -> Path:
    """``folder / name``, if need be made by ``make(path)``: by one process, while others that want it wait.

    The folder of ``path`` is empty and for ``make`` alone; what else it leaves there is removed. Where ``folder``
    cannot be written or its disk is full, a folder of this user among the temporary files serves instead. ``what`` is
    announced on standard error before it is made. Nothing is kept if ``make`` raises; what it raises is passed on.
    Raises :class:`CannotRun` if there is no folder to write to.
    """
    if os.path.exists(folder / name):
        return folder / name
    problem = _problem_of(folder)
    if not problem:
        try:
            return _make_once(folder, name, make, what, "once for this machine")
        except (CannotRun, OSError) as error:
            problem = _problem_of(folder) or _full_disk(error)
            if not problem:
                raise
    if (found := find_compiled(folder, name)) is not None:
        return found
    place = _temporary_folder(folder, problem)
    duration = f"into {place}: {folder} cannot be written ({problem}; MINISGL_CACHE_DIR names another)"
    return _make_once(place, name, make, what, duration)


def _make_once(folder: Path, name: str, make: Callable[[Path], None], what: str, duration: str) -> Path:
    target = folder / name
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            if what:
                with contextlib.suppress(OSError):  # a standard error that takes nothing
                    print(f"minisgl: compiling {what}, {duration}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                draft = Path(scratch) / name
                make(draft)
                os.replace(draft, target)
    return target


def _full_disk(error: CannotRun | OSError) -> str:
    """What an error says of a disk that was filled while a compiler ran; empty if it was something else."""
    if isinstance(error, OSError):
        return error.strerror or "" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
    return os.strerror(errno.ENOSPC) if error.reason.code == _NO_ROOM else ""


def _problem_of(folder: Path) -> str:
    """Why nothing can be written to a folder, which is made if need be; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w"):
            pass
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _temporary_home() -> Path:
    """One folder for all processes of this user."""
    try:
        base = tempfile.gettempdir()
    except OSError:  # none can be written
        base = "/tmp"
    return Path(base) / f"minisgl-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Can no other user write to it? Code is loaded from there, and any user may make a folder of that name."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _temporary_folder(folder: Path, problem: str) -> Path:
    """A writable folder below :func:`_temporary_home`; if another user holds that, one for this process alone.

    It replaces ``folder``, which has a ``problem``.
    """
    home = _temporary_home()
    try:
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
        if not _is_private(home):
            home = Path(tempfile.mkdtemp(prefix="minisgl-"))
            atexit.register(shutil.rmtree, home, ignore_errors=True)
        found = _problem_of(home / folder.name)
    except OSError as error:
        found = error.strerror or type(error).__name__
    if found:
        supported = f"{folder} cannot be written ({problem}), nor can {home} ({found})"
        fix = f"make room there, or set MINISGL_CACHE_DIR to a folder with {_ROOM >> 20} MiB free"
        raise CannotRun(Reason("no-cache", "disk", "a folder for compiled code", supported, fix))
    return home / folder.name
