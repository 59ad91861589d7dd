"""The path of one token stays short: Python frames down to a graph's replay, and files from a prompt to a token.

A file counts if any of its functions runs between the call of ``LLM.generate`` and its return, for one prompt and two
tokens, a prefill pass and a decode pass, on an engine that is already built. Generated code, such as that of named
tuples, belongs to no file. A frame counts if it is below ``Scheduler.step``, that one included, and above nothing but
compiled code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import minisgl_core
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.scheduler import Scheduler

pytest.importorskip("minisgl_cpu_sim")

from minisgl_cpu_sim.graph.emulated import EmulatedGraph

ROOT = f"{Path(minisgl_core.__file__).parent}{os.sep}"
MOST_FRAMES = 7
MOST_FILES = 41
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_running_req": 2,
    "num_page_override": 64,
    "max_seq_len_override": 32,
    "progress": False,
}
TWO_TOKENS = SamplingParams(max_tokens=2, ignore_eos=True)


def test_a_graphs_replay_is_at_most_seven_frames_below_the_schedulers_step(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    replay = EmulatedGraph.replay

    def counted(self: EmulatedGraph[Any]) -> Any:
        frame, depth = sys._getframe(1), 2  # the caller's, and that of the replay itself
        while frame.f_code is not Scheduler.step.__code__:
            assert frame.f_back is not None
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        return replay(self)

    monkeypatch.setattr(EmulatedGraph, "replay", counted)
    with LLM(tiny("q3"), **SETTINGS, cuda_graph_max_bs=1, backends={"graph": "emulated"}) as llm:
        llm.generate([5, 6, 7], TWO_TOKENS, progress=False)
    assert depths
    assert max(depths) <= MOST_FRAMES


def test_few_files_run_between_a_prompt_and_its_token(tiny: Callable[[str], Path]) -> None:
    seen: set[str] = set()
    tracing = False

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if tracing and event == "call" and name.startswith(ROOT):
            seen.add(name.removeprefix(ROOT))

    threading.setprofile(note)  # the engine's thread starts with it
    try:
        llm = LLM(tiny("q3"), **SETTINGS, cuda_graph_max_bs=0)
    finally:
        threading.setprofile(None)
    before = sys.getprofile()
    try:
        sys.setprofile(note)
        tracing = True
        llm.generate([5, 6, 7], TWO_TOKENS, progress=False)
        tracing = False
    finally:
        sys.setprofile(before)
        llm.shutdown()
    assert {"scheduler/scheduler.py", "engine/engine.py", "models/decoder.py"} <= seen
    assert len(seen) <= MOST_FILES, "\n".join(sorted(seen))
