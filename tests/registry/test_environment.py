from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from minisgl_core.installation import Installed


def test_versions_are_those_of_installed_distributions() -> None:
    assert Installed().version("pluggy") is not None
    assert Installed().version("no-such-distribution") is None


def test_programs_are_those_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mycc"
    program.write_text("")
    program.chmod(0o755)
    assert not Installed().has_program("mycc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Installed().has_program("mycc")


def test_a_module_is_found_without_importing_it_or_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vendor_lib" / "sub").mkdir(parents=True)
    for package in ("vendor_lib", "vendor_lib/sub"):
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "vendor_lib" / "sub" / "kernels.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        name: Installed().has_module(name)
        for name in (
            "vendor_lib",
            "vendor_lib.sub",
            "vendor_lib.sub.kernels",
            "vendor_lib.other",
            "vendor_lib.sub.kernels.deeper",
            "no_such_lib",
            "no_such_lib.sub",
        )
    }
    assert [name for name, here in found.items() if here] == ["vendor_lib", "vendor_lib.sub", "vendor_lib.sub.kernels"]
    assert not any(name.startswith("vendor_lib") for name in sys.modules)


def test_a_module_that_is_loaded_counts_whatever_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faked_lib", ModuleType("faked_lib"))
    monkeypatch.setitem(sys.modules, "faked_lib.part", ModuleType("faked_lib.part"))
    assert Installed().has_module("faked_lib") and Installed().has_module("faked_lib.part")
    assert not Installed().has_module("faked_lib.other")
    monkeypatch.setitem(sys.modules, "blocked_lib", None)
    assert not Installed().has_module("blocked_lib")
