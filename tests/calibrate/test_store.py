"""A calibration holds for its device, shapes and versions, and for the backends as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.calibration.store import (
    Calibration,
    Loaded,
    Point,
    file_of,
    load,
    save,
    scope_of,
    sources_of,
    unmeasured,
    versions_now,
)
from minisgl_core.env import ENV
from minisgl_core.errors import UsageError
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import BackendSpec
from minisgl_core.registry import Candidate, DeviceFacts, PlanQuery, PluginRecord, Registry

MODEL = geometry("qwen3-0.6b")
CUDA = DeviceFacts("cuda", 90, "NVIDIA H200", driver="570.1")


def query(device: DeviceFacts = CUDA, **fields: Any) -> PlanQuery:
    return PlanQuery(MODEL, device, "bfloat16", graph=device.kind == "cuda", **fields)


def registry(**versions: str) -> Registry:
    """One plugin ``dist`` whose attention backends have these versions."""
    items = tuple(
        Candidate(BackendSpec("attention", name, "m:C"), "dist", version) for name, version in versions.items()
    )
    return Registry((PluginRecord("dist", "x = y", candidates=items),))


def calibration(asked: PlanQuery, *points: Point) -> Calibration:
    return Calibration(scope_of(asked, MODEL), versions_now(asked), points, ("kv: x failed",))


A = Point("attention.decode", 4, 128, "a@dist", "1.0", 12.5, captured=True, page_size=16)
B = Point("attention.decode", 4, 128, "b@dist", "2.0", 25.0)


def test_what_is_kept_is_found_again() -> None:
    made = calibration(query(), A, B)
    path = save(made)
    assert path == file_of(made.scope) and path.parent == ENV.CACHE_DIR.value / "calibration"
    assert load(query(), MODEL, registry(a="1.0", b="2.0")) == Loaded(made)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_nothing_was_measured() -> None:
    assert load(query(), MODEL, registry()) == Loaded(None)


@pytest.mark.parametrize(
    "other",
    [
        query(replace(CUDA, name="NVIDIA H100")),
        query(replace(CUDA, sm=100)),
        query(DeviceFacts("cpu")),
        query(tp_size=2),
        query(kv_dtype="float16"),
        replace(query(), dtype="float16"),
        replace(query(), graph=False),
    ],
)
def test_another_device_shape_or_dtype_is_another_calibration(other: PlanQuery) -> None:
    save(calibration(query(), A))
    assert load(other, MODEL, registry(a="1.0")) == Loaded(None)


def test_other_weights_of_the_same_shape_share_it_and_another_model_does_not() -> None:
    save(calibration(query(), A))
    deeper = replace(MODEL, num_layers=99, eos_token_ids=(1,))
    assert load(query(), deeper, registry(a="1.0")).calibration is not None
    assert load(query(), replace(MODEL, hidden_size=2048), registry(a="1.0")) == Loaded(None)


def test_changed_versions_make_all_of_it_stale_and_are_named() -> None:
    made = calibration(query(), A)
    save(replace(made, versions={**made.versions, "torch": "1.0"}))
    found = load(query(), MODEL, registry(a="1.0"))
    assert found.calibration is None
    assert found.ignored == (f"all of it is stale: torch 1.0 is now {made.versions['torch']}",)
    save(made)
    newer = query(replace(CUDA, driver="580.9"))
    assert load(newer, MODEL, registry(a="1.0")).ignored == ("all of it is stale: driver 570.1 is now 580.9",)


def test_a_changed_backend_is_left_out_and_named() -> None:
    save(calibration(query(), A, B, replace(B, rows=8)))
    found = load(query(), MODEL, registry(a="1.1"))
    assert found.calibration is not None and found.calibration.points == ()
    assert found.ignored == (
        "attention:a@dist was measured at version 1.0, it is now 1.1",
        "attention:b@dist was measured at version 2.0, it is not installed",
    )
    kept = load(query(), MODEL, registry(a="1.0", b="3.0"))
    assert kept.calibration is not None and kept.calibration.points == (A,)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 3}', '{"format": 3, "points": [{"entry": 1}]}'])
def test_a_damaged_file_is_said_to_be_one(text: str) -> None:
    path = save(calibration(query(), A))
    path.write_text(text)
    found = load(query(), MODEL, registry(a="1.0"))
    assert found.calibration is None and f"{path} cannot be read" in found.ignored[0]


def test_another_format_is_ignored() -> None:
    path = save(calibration(query(), A))
    path.write_text(json.dumps({"format": 1}))
    assert load(query(), MODEL, registry()).ignored == (f"{path} has format 1, this version reads 3",)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ENV.CACHE_DIR.value = tmp_path / "file"
    with pytest.raises(UsageError, match=r"cannot be kept in .*set MINISGL_CACHE_DIR"):
        save(calibration(query(), A))


def test_what_was_not_measured_where_others_were() -> None:
    made = calibration(query(), A)
    asked = [("attention.decode", "a@dist"), ("attention.decode", "new@dist"), ("kv", "torch@dist")]
    assert unmeasured(made, asked) == ["attention.decode: new@dist"]


def test_the_usual_window_is_part_of_the_shape() -> None:
    windowed = replace(MODEL, windows=(None, *(512,) * 27))
    assert scope_of(query(), windowed)["window"] == 512
    assert scope_of(query(max_seq_len=512), windowed)["window"] is None, "it never cuts anything"
    assert scope_of(query(), MODEL)["window"] is None


def test_case_127_measurements_of_an_editable_kernel_end_when_its_source_changes(tmp_path: Path) -> None:
    kernel, plugin = tmp_path / "package" / "kernels" / "fast.cu", tmp_path / "package" / "plugin.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one")
    plugin.write_text("")
    items = (Candidate(BackendSpec("attention", "a", "m:C"), "dist", "1.0"),)
    editable = Registry((PluginRecord("dist", "x = y", file=str(plugin), editable=True, candidates=items),))
    save(calibration(query(), replace(A, source=sources_of(editable)["dist"])))
    (kernel.parent / "__pycache__").mkdir()
    (kernel.parent / "__pycache__" / "fast.pyc").write_text("compiled")
    assert load(query(), MODEL, editable).ignored == ()
    kernel.write_text("two")
    loaded = load(query(), MODEL, editable)
    assert loaded.calibration is not None and loaded.calibration.points == ()
    assert loaded.ignored == ("attention:a@dist was measured before its source changed",)
    fixed = Registry((replace(editable.plugins[0], editable=False),))
    save(calibration(query(), A))
    assert load(query(), MODEL, fixed).ignored == (), "a version identifies what is not editable"
