"""Words of a capability set that change what the engine does, each shown with a backend that declares it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import SamplingParams
from minisgl_core.engine import plan_resolution
from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import BackendSpec, Caps, Role, SampleArgs, SamplingMode
from minisgl_core.registry import Candidate, PluginRecord, Registry, discover

pytest.importorskip("minisgl_cpu_sim")

from minisgl_cpu_sim.pure.attention import TorchAttention
from support.driver import Driver, greedy
from support.settings import ANY_MODEL

ALL: dict[str, Any] = {**ANY_MODEL, "devices": ("cpu",)}
Declare = Callable[..., None]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """``declare(role, class, **caps)``: a backend ``declared`` among the installed ones."""

    def add(role: Role, cls: type, **caps: Any) -> None:
        module = ModuleType("declared_backend")
        module.Declared = cls  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec = BackendSpec(role, "declared", "declared_backend:Declared", tier=0, caps=(Caps(**{**ALL, **caps}),))
        candidate = Candidate(spec, "minisgl-cpu-sim", "1.0")

        def found(**lists: Any) -> Registry:
            base = discover(**lists)
            return Registry((*base.plugins, PluginRecord("declared", "x", candidates=(candidate,))), base.notes)

        monkeypatch.setattr(plan_resolution, "discover", found)

    return add


class Logs(TorchAttention):
    """What it was asked to do, in order."""

    calls: list[tuple[str, Any]]

    def prepare_metadata(self, batch: Any) -> None:
        self.calls.append(("eager", batch.phase))
        super().prepare_metadata(batch)

    def prepare_for_replay(self, batch: Any) -> None:
        self.calls.append(("plan", batch.view.kv_lens_host))


@pytest.fixture
def logs() -> type[Logs]:
    return type("Declared", (Logs,), {"calls": []})


@pytest.mark.parametrize("host_plan", [True, False])
def test_a_host_plan_is_made_before_each_replay(
    host_plan: bool, declare: Declare, logs: type[Logs], tiny: Callable[[str], Path]
) -> None:
    declare("attention", logs, host_plan=host_plan)
    with Driver(tiny("mistral-full"), backends={"attention": "declared"}, cuda_graph_max_bs=1) as driver:
        logs.calls.clear()
        driver.tokens([[5, 6, 7]], greedy(4))
        replays = len(driver.replays)
    planned = [lens for what, lens in logs.calls if what == "plan"]
    assert replays >= 3
    assert planned == ([(3 + n,) for n in range(1, replays + 1)] if host_plan else [])


def test_a_backend_of_one_phase_serves_that_phase(
    declare: Declare, logs: type[Logs], tiny: Callable[[str], Path]
) -> None:
    declare("attention", logs, phases=("prefill",))
    with pytest.raises(BackendError, match=r"phases: wanted decode, supported prefill"):
        Driver(tiny("mistral-full"), backends={"attention": "declared"}, num_page_override=64)
    with Driver(tiny("mistral-full"), backends={"attention": ["declared", "torch"]}) as driver:
        driver.tokens([[5, 6, 7]], greedy(4))
    assert {phase for _, phase in logs.calls} == {"prefill"}


def test_what_cannot_be_captured_is_refused_in_captured_steps(
    declare: Declare, logs: type[Logs], tiny: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"backends": {"attention": "declared"}}
    declare("attention", logs, graph="never")
    with pytest.raises(BackendError, match="graph: wanted capture of decode steps, supported never"):
        Driver(tiny("mistral-full"), cuda_graph_max_bs=1, **settings)
    with Driver(tiny("mistral-full"), cuda_graph_max_bs=0, **settings) as driver:
        driver.tokens([[5, 6, 7]], greedy(4))
        assert not driver.replays and ("eager", "decode") in logs.calls
    declare("attention", logs, graph="decode")
    with Driver(tiny("mistral-full"), cuda_graph_max_bs=1, **settings) as driver:
        logs.calls.clear()
        driver.tokens([[5, 6, 7]], greedy(4))
        assert driver.replays and ("eager", "decode") not in logs.calls
    settings["backends"]["graph"] = "eager"  # a runner of level never
    with Driver(tiny("mistral-full"), cuda_graph_max_bs=1, **settings) as driver:
        driver.tokens([[5, 6, 7]], greedy(4))
        assert not driver.replays and ("eager", "decode") in logs.calls


class FirstSeed(ComposedOps):
    """Uses the first row's seed for all, as FlashInfer does."""

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        seeds = {name: getattr(args, name)[:1].expand_as(args.positions) for name in ("seed_lo", "seed_hi")}
        return super().sample(logits, args._replace(**seeds), mode)


@pytest.mark.parametrize("per_row_seed", [True, False])
def test_auto_samples_with_seeds_by_row(per_row_seed: bool, declare: Declare, tiny: Callable[[str], Path]) -> None:
    """The declaration decides whether ``auto`` takes it; here it is wrong, so that the engine's tokens show it."""
    declare("ops", FirstSeed, ops=("sample",), per_row_seed=per_row_seed)
    hot = [SamplingParams(temperature=4.0, seed=seed, max_tokens=6, ignore_eos=True) for seed in (1, 2)]
    with Driver(tiny("mistral-full")) as driver:
        together = [answer.tokens for answer in driver.serve([[5, 6, 7]] * 2, hot)]
        alone = [driver.serve([[5, 6, 7]], [params])[0].tokens for params in hot]
    assert (together == alone) is not per_row_seed
