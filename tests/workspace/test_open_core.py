"""The core names no vendor, no first-party plugin and no kind of device: those are data, or live in builtin/."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from minisgl_core.plugin_api.devices import DEVICE_KINDS

CORE = Path(__file__).resolve().parents[2] / "minisgl_core"
INDEX = json.loads((CORE / "registry" / "index.json").read_text())
LIBRARIES = json.loads((CORE / "sandbox" / "libraries.json").read_text())

KINDS = {*DEVICE_KINDS, "rocm", "hip", "xpu", "mps", "tpu", "npu"}
VENDORS = {"nvidia", "amd", "intel", "triton", "vllm", "xformers", "cutlass", "tensorrt"}
VENDORS |= {name for name in LIBRARIES["heavy"] if "flash" in name}
PLUGINS = {name.replace("-", "_") for name in INDEX["distributions"]} - {"minisgl_core"}
BACKENDS = {name for name in INDEX["backends"] if name not in ("cpu", "cuda", "torch", "fused")}

REASONS = {
    # What may hold such a word, by file and word, and why.
    ("bench/provenance.py", "cuda"): "the version of CUDA that torch was built for, as torch calls it",
    ("bench/provenance.py", "triton"): "a library whose version is reported with each figure",
    ("testing/report.py", "flash-attn"): "a library whose version is reported on the card",
    ("testing/report.py", "triton"): "a library whose version is reported on the card",
    ("testing/report.py", "flashinfer-python"): "a library whose version is reported on the card",
    ("testing/endurance.py", "cpu"): "torch's name of the host in a table by `device.type`",
}


def words_of(text: str) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9]+", text.lower().replace("_", "-")) if word}


def offending(text: str) -> str:
    """The device kind, vendor, plugin or backend that a string literal names; empty if none."""
    if text in KINDS | BACKENDS:
        return text
    name = text.lower().replace("-", "_")
    if name.partition(".")[0] in PLUGINS | VENDORS:
        return name
    found = words_of(text) if re.fullmatch(r"[\w./*\[\]-]+", text) else set()
    return next(iter(sorted(found & VENDORS)), "")


def is_torch_host(node: ast.AST) -> bool:
    """Is it torch's own word for host memory: ``x.to("cpu")``, ``device="cpu"``, ``tensor.device.type == "cpu"``?"""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", "") in ("to", "device")
    if isinstance(node, ast.keyword):
        return node.arg in ("device", "map_location")
    return isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "type"


def literals(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(text, line) of each string literal that is neither a docstring nor torch's word for host memory."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if is_torch_host(node):
            children = ast.iter_child_nodes(node)
            skipped |= {id(one) for one in children if isinstance(one, ast.Constant) and one.value == "cpu"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value, node.lineno


@cache
def hits() -> list[tuple[str, str, int]]:
    return list(_hits())


def _hits() -> Iterator[tuple[str, str, int]]:
    for file in sorted(CORE.rglob("*.py")):
        path = file.relative_to(CORE).as_posix()
        if path.startswith("builtin/"):
            continue
        for text, line in literals(ast.parse(file.read_text(encoding="utf-8"))):
            if offending(text):
                yield path, text, line


def test_the_core_names_no_vendor_no_plugin_and_no_kind_of_device() -> None:
    found = [f"{path}:{line}: {text!r}" for path, text, line in hits() if (path, text) not in REASONS]
    assert found == [], "make it data (devices.json, index.json, libraries.json), or move it to builtin/"


def test_every_reason_is_still_needed() -> None:
    assert {(path, text) for path, text, _ in hits()} >= set(REASONS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = facts.kind == 'cuda'", "cuda"),
        ("x = ('cpu', 'tpu')", "cpu"),
        ("HEAVY = ('flash_attn',)", "flash_attn"),
        ("file = '/proc/driver/nvidia/version'", "/proc/driver/nvidia/version"),
        ("remedy = 'minisgl-flashinfer'", "minisgl-flashinfer"),
        ("import_module('minisgl_cuda.plugin')", "minisgl_cuda.plugin"),
        ("backends = {'attention': 'cuda_decode'}", "cuda_decode"),
        ("x.to('cuda')", "cuda"),
    ],
)
def test_the_search_finds(source: str, found: str) -> None:
    assert next(text for text, _ in literals(ast.parse(source)) if offending(text)) == found


@pytest.mark.parametrize("source", ["x.to('cpu')", "y = x.device.type == 'cpu'", "f(device='cpu')", "'''nvidia'''"])
def test_the_search_leaves_torchs_word_for_the_host_and_docstrings(source: str) -> None:
    assert not [text for text, _ in literals(ast.parse(source)) if offending(text)]
