from __future__ import annotations

import pytest

from minisgl_core.errors import UsageError, nearest


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("page_sise", ["page_size", "tp_size", "seed"], "page_size"),
        ("genrate", ["generate", "chat"], "generate"),
        ("MINISGL_PAGE_SISE", ["MINISGL_PAGE_SIZE", "MINISGL_PORT", "MINISGL_SEED"], "MINISGL_PAGE_SIZE"),
        ("MINISGL_PRT", ["MINISGL_PAGE_SIZE", "MINISGL_PORT", "MINISGL_SEED"], "MINISGL_PORT"),
        ("graph:emulatd", ["graph:eager", "graph:emulated"], "graph:emulated"),
        ("gaph:emulated", ["graph:eager", "graph:emulated"], "graph:emulated"),
        ("max_seq_len", ["max_seq_len_override", "max_running_req"], "max_seq_len_override"),
        ("attenton", ["attention"], "attention"),
        ("minisgl-fs", ["minisgl-fa", "minisgl-core"], "minisgl-fa"),
        ("long_prefix_x", ["long_prefix_y"], "long_prefix_y"),
        ("M_OVERLAP", ["M_DISABLE_OVERLAP_SCHEDULING", "M_MODEL"], "M_DISABLE_OVERLAP_SCHEDULING"),
        ("M_OVERLAPP", ["M_DISABLE_OVERLAP_SCHEDULING", "M_MODEL"], "M_DISABLE_OVERLAP_SCHEDULING"),
        ("M_TP", ["M_TP_SIZE", "M_DTYPE"], "M_TP_SIZE"),
        ("M_GRAPH", ["M_CUDA_GRAPH_MAX_BS", "M_BACKEND_GRAPH"], "M_BACKEND_GRAPH"),
        ("plugin", ["plugins", "new-plugin"], "plugins"),
        ("loop", ["moe loop (no graphs)", "chunk 2048"], "moe loop (no graphs)"),
        ("fa", ["attention flashinfer", "attention fa", "attention fa+flashinfer", "kv torch"], "attention fa"),
        ("cuda_decode", ["attention fa+cuda_decode", "attention fa", "kv cpp"], "attention fa+cuda_decode"),
        ("cache_size", ["page_size", "cache"], "page_size"),
    ],
)
def test_the_nearest_name_is_offered(name: str, known: list[str], meant: str) -> None:
    assert nearest(name, known) == f"did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("MINISGL_FOO", ["MINISGL_PAGE_SIZE", "MINISGL_PORT", "MINISGL_SEED"]),
        ("minisgl_frobnicate", ["minisgl_models", "minisgl_linears"]),
        ("x", ["attention", "kv"]),
        ("x", []),
    ],
)
def test_a_name_that_only_begins_as_they_all_do_is_near_to_none(name: str, known: list[str]) -> None:
    assert nearest(name, known) == ""


def test_an_error_is_one_line_with_what_and_what_to_do() -> None:
    error = UsageError("x is 3", field="x", value=3, remedy="use 4")
    assert (str(error), error.message, error.field, error.value, error.exit_code) == (
        "x is 3; use 4",
        "x is 3",
        "x",
        3,
        2,
    )
    assert str(UsageError("x is 3")) == "x is 3"
