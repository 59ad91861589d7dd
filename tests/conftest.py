"""Fixtures that the tests of all packages share: the tiny checkpoints and transformers' answers on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from minisgl_core.env import ENV
from minisgl_core.plugin_api import cache_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long a machine takes to make an example depends on what else it does.
settings.register_profile("shared", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared")


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module ``support.make_checkpoints``: ``RECIPES``, ``ensure_checkpoint``, ``reference``."""
    from support import make_checkpoints

    return make_checkpoints


@pytest.fixture(scope="session")
def tiny(checkpoints: ModuleType) -> Callable[[str], Path]:
    """``tiny("q3")`` -> the folder of that checkpoint, made on first use."""
    return checkpoints.ensure_checkpoint  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def answers(checkpoints: ModuleType) -> Callable[[str], Any]:
    """``answers("q3")`` -> its ``Reference``: prompts, continuations, margins, logits."""
    return checkpoints.reference  # type: ignore[no-any-return]


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[Path]:
    """A cache folder of this test, empty but for the compiled kernels: those take half a minute."""
    kernels, folder = cache_dir("cpu_sim"), tmp_path / "cache"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "cpu_sim").symlink_to(kernels)
    ENV.CACHE_DIR.value = folder
    yield folder
    ENV.CACHE_DIR.reset()


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder: no config file, no ``MINISGL_*`` variable of this machine."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("MINISGL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def one_thread() -> None:
    """torch computes on one thread, here and in the tests that follow."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def integrity_check() -> Iterator[None]:
    """Every scheduler made in the module checks its books after every step; tests share two cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ENV.CHECK_INTEGRITY.value = True
    yield
    ENV.CHECK_INTEGRITY.reset()
    torch.set_num_threads(threads)
