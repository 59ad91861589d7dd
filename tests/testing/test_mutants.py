"""The kit is tested by wrong backends: it must catch every one, and name the check that did."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from minisgl_core.plugin_api import FUSABLE_OPS, OP_NAMES, BackendSpec, Caps, OneOf, Role
from minisgl_core.testing import BackendUnderTest, DeviceFixture, checks_of, run_checks
from minisgl_core.testing.check_process import CheckProcess
from support.settings import ANY_MODEL

pytest.importorskip("minisgl_cpu_sim")

DTYPES = ("float32", "bfloat16", "float16")
FULL = Caps(
    **{**ANY_MODEL, "dtypes": DTYPES, "kv_dtypes": DTYPES},
    devices=("cpu",),
    features=frozenset({"window", "softcap"}),
    ops=OP_NAMES,
    formats=("plain",),
    per_row_seed=True,
)
PLANNED = replace(FULL, host_plan=True)
PRODUCTS = replace(FULL, ops=())
FUSED = replace(FULL, ops=FUSABLE_OPS)
CHOICES = Caps(grammars=("choice",))
REGEXES = Caps(grammars=("regex",))


@dataclass(frozen=True)
class Mutant:
    """``where``: part of the names of the checks that are run; ``says``: part of what the failed one says."""

    role: Role
    name: str
    where: str
    says: str = ""
    caps: Caps = FULL
    module: str = ""

    @property
    def spec(self) -> BackendSpec:
        module = self.module or f"mutants_{self.role if self.role in ('attention', 'moe', 'grammar') else 'other'}"
        return BackendSpec(role=self.role, name=self.name, factory=f"{module}:{self.name}", caps=(self.caps,))


STATE = [
    Mutant("attention", "PlanOfTheLastEqualLengths", "prefill/float32/moved", "batch 1, of the same lengths"),
    Mutant("attention", "PlanOfTheLastEqualLengths", "decode/float32/moved", "batch 1, of the same lengths"),
    Mutant("attention", "PlanOfTheSameAddress", "decode/float32/moved", "with other pages and contents"),
    Mutant("attention", "KeysOfTheLastEqualSlots", "prefill/float32/moved", "with other contents"),
    Mutant("attention", "ReplayPlanOfTheLastEqualLengths", "replay", "of equal lengths on other rows", PLANNED),
    Mutant("attention", "PoolOfTheLastInstance", "in_turn", "instance 0 of 2"),
    Mutant("attention", "SetupOfTheLastInstance", "decode/float32/in_turn", "instance 0 of 2"),
    Mutant("attention", "ClosesWhatAllInstancesUse", "prefill/float32/in_turn", "TypeError"),
    Mutant("attention", "CapturesIntoOneBuffer", "replay_in_turn", "moved_pointer"),
    Mutant("attention", "SetsTheDefaultDtype", "decode/float32/ragged", "torch's default dtype from torch.float32 to"),
    Mutant("attention", "SetsTheThreads", "decode/float32/ragged", "torch's number of threads from 1 to 2"),
    Mutant("attention", "AsksForDeterminism", "decode/float32/ragged", "deterministic algorithms from off to warn"),
    Mutant("attention", "SwitchesGradModeOff", "decode/float32/ragged", "torch's grad mode from True to False"),
    Mutant("attention", "SeedsTheProcess", "decode/float32/ragged", "torch's random state"),
]

HIDDEN = [
    Mutant("attention", "WrongFromCall100", "decode/float32/endurance", "after 50 others"),
    Mutant("attention", "WrongFromCall100", "prefill/float32/endurance", "after 50 others"),
    Mutant("attention", "KeepsMemoryOfEachCall", "decode/float32/endurance", "bytes in use"),
    Mutant("attention", "KeepsATableOfEachLength", "decode/float32/endurance", "each new length, leaves"),
    Mutant("attention", "DiffersInOneOfTwentyCalls", "decode/float32/endurance", "the same call, run again after"),
    Mutant("attention", "CannotDo17KVHeads", "kv_heads=17"),
    Mutant("attention", "PairsOddHeads", "heads_of=smollm2-135m"),
    Mutant("attention", "ForgetsRowsBeyond64", "decode/float32/batch=130"),
    Mutant("attention", "WindowsOf1024AtMost", "window=1500"),
    Mutant("attention", "FactsOfEightLayers", "layers=41", "layer 8"),
    Mutant("attention", "ForgetsDimsBeyond512", "head_dim=576"),
    Mutant("attention", "PagesOf256AtMost", "page_size=512"),
    Mutant("attention", "SlotsIn16Bits", "slots=70000"),
    Mutant("kv", "StoresSlotsIn16Bits", "slots=70000"),
    Mutant("kv", "Stores1024RowsAtMost", "tokens=1100"),
    Mutant("linear", "SumsThe8192FirstColumns", "n=3,k=", caps=PRODUCTS),
    Mutant("linear", "Numbers65536Outputs", "k=64", caps=PRODUCTS),
    Mutant("linear", "KeepsEveryInput", "endurance", "bytes in use", PRODUCTS),
    Mutant("attention", "OffBySixPercentInBfloat16", "decode/bfloat16/ragged", "allowed 0.02"),
    Mutant("attention", "PatchesTheCore", "decode/float32/ragged", "code of minisgl_core (LayerFacts.__repr__)"),
    Mutant("attention", "ChangesTheEnvironment", "decode/float32/ragged", "the environment (OMP_SCHEDULE)"),
    Mutant(
        "attention",
        "ChangesTheEnvironmentAtImport",
        "contract/imports",
        "importing impolite or impolite.environment changes the environment: OMP_SCHEDULE",
        module="impolite.environment",
    ),
    Mutant(
        "attention",
        "ImportsTheEngine",
        "contract/imports",
        "minisgl_core.engine (private.py:8), minisgl_core.scheduler (private.py:10)",
        module="impolite.private",
    ),
]

MUTANTS = [
    Mutant("attention", "MaskMissesTheQueryItself", "prefill/float32", "layer 0"),
    Mutant("attention", "IgnoresTheWindow", "window=16"),
    Mutant("attention", "WindowOffByOne", "window=16"),
    Mutant("attention", "ScalesByHeadDim", "decode/float32"),
    Mutant("attention", "WritesPaddingIntoALivePage", "decode/float32", "the pool was changed"),
    Mutant("attention", "LengthsOfTheCaptureAtReplay", "replay"),
    Mutant("attention", "HeadsInterleaved", "gqa_ratio=3"),
    Mutant("attention", "ReadsPastTheEnd", "decode/float32"),
    Mutant("attention", "PageZeroForTheLastPartialPage", "page_size=64"),
    Mutant("attention", "IgnoresThePrefix", "prefill/float32"),
    Mutant("attention", "PrefillSeesTheFuture", "prefill/float32"),
    Mutant("attention", "IgnoresTheSoftcap", "softcap=2"),
    Mutant("attention", "ScalesQInPlace", "decode/float32", "q, k or v was changed"),
    Mutant("attention", "AnswersIntoQ", "decode/float32", "q, k or v was changed"),
    Mutant("attention", "OneBufferForAllResults", "decode/float32", "shares memory with an earlier result"),
    Mutant("attention", "ReadsALengthOnTheHost", "replay", "GraphViolation"),
    Mutant("attention", "KeepsEveryStepsMetadata", "decode/float32/growth", "left"),
    Mutant("attention", "AllocatesAtReplay", "replay", "left", PLANNED),
    Mutant("attention", "IgnoresTheHostPlanOfAReplay", "replay", "replay", PLANNED),
    Mutant("attention", "TakesQToBeContiguous", "decode/float32"),
    Mutant("attention", "FactsOfLayerZero", "layers", "layer 1"),
    Mutant("attention", "CacheOfLayerZero", "layers", "layer 1"),
    Mutant("attention", "SoftmaxOverflows", "huge_scores", "got nan"),
    Mutant("attention", "ComputesInHalfPrecision", "decode/float32"),
    Mutant("attention", "TakesPagesToBeAdjacent", "page_size=16"),
    Mutant("attention", "PagesOfRowZero", "decode/float32"),
    Mutant("attention", "MultipliesTheTailByZero", "decode/float32", "got nan"),
    Mutant("attention", "EditsTheView", "decode/float32", "batch.view.kv_lens_device was changed"),
    Mutant("attention", "CannotDoHeadDim80", "head_dim=80", "unsupported head_dim 80"),
    Mutant("attention", "LeavesOutTheLastTileOfLongPrompts", "prompt=577", "of row 0: 577 new of 577 tokens"),
    *(replace(mutant, module="mutants_state") for mutant in STATE),
    *(replace(mutant, module=mutant.module or "mutants_hidden") for mutant in HIDDEN),
    Mutant("kv", "OffsetOverflows", "store"),
    Mutant("kv", "WritesOneRowTooMany", "store"),
    Mutant("kv", "WrongPageStride", "store"),
    Mutant("kv", "TakesKToBeContiguous", "store"),
    Mutant("kv", "SwapsKAndV", "store"),
    Mutant("kv", "IndexIgnoresStart", "index", "index of ids"),
    Mutant("kv", "IndexMultipliesByZero", "index", "got nan"),
    Mutant("kv", "MatchStopsEarly", "match_len"),
    Mutant("kv", "RowsOfTheLastInstance", "store,in_turn", "instance 0 of 3"),
    Mutant("moe", "SwapsGateAndUp", "forward"),
    Mutant("moe", "ActivatesWithGelu", "forward"),
    Mutant("moe", "ClampsTheGate", "large_gates"),
    Mutant("moe", "ExponentialOverflows", "large_gates", "got nan"),
    Mutant("moe", "FlushesSmallGates", "tiny_gates"),
    Mutant("moe", "WeighsBeforeTheActivation", "forward"),
    Mutant("moe", "NormalisesTheWeights", "forward"),
    Mutant("moe", "RoundsTheWeights", "forward"),
    Mutant("moe", "SumsInHalfPrecision", "forward"),
    Mutant("moe", "RepacksTheExpertsInHalfPrecision", "forward"),
    Mutant("moe", "ForgetsEmptyExperts", "few_experts"),
    Mutant("moe", "ForgetsTheLastExpert", "forward"),
    Mutant("moe", "ForgetsWhatIsBeyondABlock", "one_expert,tokens=130"),
    Mutant("moe", "ForgetsTheFifthExpertOfAToken", "top_k=8"),
    Mutant("moe", "NumbersExpertsInSixBits", "experts=128"),
    Mutant("moe", "CountsPadding", "padding", "a row without experts is not zero"),
    Mutant("moe", "CountsPaddingForTheLastExpert", "padding", "a row without experts is not zero"),
    Mutant("moe", "MultipliesPaddingByZero", "padding", "a row without experts is not zero"),
    Mutant("moe", "AnswersIntoX", "forward", "x1 was changed"),
    Mutant("moe", "SortsTheIdsInPlace", "forward", "topk_ids1 was changed"),
    Mutant("moe", "OneBufferForAllResults", "forward", "shares memory with an earlier result"),
    Mutant("moe", "KeepsEveryResult", "growth", "left"),
    Mutant("moe", "WeightsOfTheFirstLayerPrepared", "forward"),
    Mutant("moe", "WeightsOfTheLastInstance", "in_turn", "instance 0 of 2"),
    Mutant("moe", "RoutingOfTheFirstLayer", "float32/layers", "layer 1"),
    Mutant("moe", "RoutingOfTheSameAddress", "rewritten", "call 1 on the same tensors"),
    Mutant("moe", "RoutingOfTheSameAddress", "float32/replay", "replay 0"),
    Mutant("ops", "NormInLowPrecision", "rms_norm"),
    Mutant("ops", "EpsOutsideTheRoot", "rms_norm/float32/large_eps"),
    Mutant("ops", "ReturnsTheOldResidual", "add_rms_norm", "the new residual"),
    Mutant("ops", "RopePairsInterleaved", "qk_norm_rope_store"),
    Mutant("ops", "RotatesTheWholeHead", "half_rotary"),
    Mutant("ops", "StoresTheUnrotatedKey", "qk_norm_rope_store", "k in the pool"),
    Mutant("ops", "PositionsOffByOne", "qk_norm_rope_store"),
    Mutant("ops", "SwapsGateAndUpOfTheActivation", "act_and_mul"),
    Mutant("ops", "RouteNeverRenormalises", "renormalize", "the experts' weights"),
    Mutant("ops", "RouteSmallestFirst", "route", "largest first"),
    Mutant("ops", "SampleIgnoresTheSeed", "random"),
    Mutant("ops", "SampleTakesRowZerosSeed", "random"),
    Mutant("ops", "TiesToTheHighestId", "greedy", "its maximum is first at"),
    Mutant("ops", "TopPKeepsOneMore", "filtered"),
    Mutant("ops", "NanRowsGiveAToken", "greedy", "expected -1"),
    Mutant("ops", "RoutesOnceForAnAddress", "route/float32/rewritten", "call 1 on the same tensors"),
    Mutant("ops", "DrawsFromTheProcessNoise", "sample/float32/random", "torch's random state"),
    Mutant("linear", "ForgetsTheBias", "bias", caps=PRODUCTS),
    Mutant("linear", "OneWeightForAllInstances", "in_turn", "instance 0 of 2", PRODUCTS),
    Mutant("linear", "TakesInNothing", "contract/methods", "lacks fused_rows and forward_fused", FUSED),
    Mutant("linear", "TakesInNothing", "contract/caps", "rms_norm", FULL),
    Mutant("linear", "ForgetsTheResidual", "norm/m=1", "x + residual", FUSED),
    Mutant("linear", "AddsIntoTheResidual", "norm/m=1", "residual", FUSED),
    Mutant("linear", "SwapsGateAndUp", "act/m=17", "the product", FUSED),
    Mutant("linear", "HasItsOwnEps", "norm/large-eps,m=5", "the product", FUSED),
    Mutant("linear", "KeepsTheFirstGains", "norm/rewritten,m=5", "call 1 on the same tensors", FUSED),
    Mutant("linear", "NormsWithoutSayingSo", "norm+act/m=1", "total is returned with a norm", FUSED),
    Mutant("graph", "PadsWithALiveRow", "mixed", "afterwards"),
    Mutant("graph", "ForgetsASize", "capture", "not recorded"),
    Mutant("graph", "RunsTheStepAtReplay", "size=2", "runs the step's Python"),
    Mutant("graph", "OneGraphForAllModes", "size=2", "logits"),
    Mutant("graph", "SkipsTheHostPlan", "size=2", "prepare_replay"),
    Mutant("graph", "ReplaysPrefill", "padding", "prefill"),
    Mutant("graph", "OneSetOfGraphsForAllRunners", "in_turn", "step 0"),
    Mutant("comm", "GathersInTheWrongOrder", "ranks=2", "all_gather"),
    Mutant("grammar", "ForgetsTokensOfSeveralBytes", "mask,v=300", "is not allowed, brute force", CHOICES),
    Mutant("grammar", "AllowsWhatOnlyBeginsRight", "mask,v=320", "is allowed, brute force", CHOICES),
    Mutant("grammar", "MayAlwaysEnd", "mask,v=300", "the end is allowed", CHOICES),
    Mutant("grammar", "NeverEnds", "samples", "accepted False", CHOICES),
    Mutant("grammar", "AddsToWhatIsThere", "mask,v=320", "is allowed, brute force", CHOICES),
    Mutant("grammar", "SetsTheBitsBeyond", "mask,v=300", "beyond the vocabulary", CHOICES),
    Mutant("grammar", "WritesOneWordMore", "mask,v=300", "memory around the mask", CHOICES),
    Mutant("grammar", "CountsBitsFromTheLeft", "mask,v=320", "brute force", CHOICES),
    Mutant("grammar", "OneStateForAllMatchers", "many", "brute force", CHOICES),
    Mutant("grammar", "AcceptsForbiddenTokens", "refused", "is forbidden but accepted", CHOICES),
    Mutant("grammar", "CompilesAnything", "regex/wrong", "is no regex, and is compiled", REGEXES),
    Mutant("grammar", "RaisesWhatItMeets", "regex/wrong", "JSONDecodeError", REGEXES),
    Mutant("grammar", "CompilesOneAtATime", "threads", "brute force", CHOICES),
]


@pytest.fixture(scope="module")
def device_fixture() -> Iterator[DeviceFixture]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "mutants"))
        yield DeviceFixture("cpu")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another test of this process may have left OMP_SCHEDULE as a mutant sets it: then nothing would change."""
    monkeypatch.delenv("OMP_SCHEDULE", raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.role}-{mutant.name}-{mutant.where}")
def test_mutant_is_caught(device_fixture: DeviceFixture, mutant: Mutant) -> None:
    under_test = BackendUnderTest(mutant.spec)
    checks = [check for check in checks_of(under_test, device_fixture, quick=True) if mutant.where in check.name]
    outcomes = run_checks(under_test, checks, device_fixture, finished=lambda outcome: outcome.status == "failed")
    assert checks and outcomes[-1].status == "failed", f"{mutant.name} survives {[check.name for check in checks]}"
    caught = outcomes[-1]
    assert mutant.says in caught.detail, caught.detail
    assert repr(caught.name) in caught.snippet and "assert_conforms(SPEC" in caught.snippet


def test_the_documentation_counts_the_mutants() -> None:
    wrong = len({(mutant.role, mutant.name) for mutant in MUTANTS})
    root = Path(__file__).resolve().parents[2]
    assert f"run on {wrong} deliberately wrong backends" in (root / "docs" / "conformance.md").read_text()
    assert f"itself tested against {wrong} wrong backends" in (root / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("role", [pytest.param("attention", marks=pytest.mark.slow), "moe"])
def test_the_base_of_the_mutants_is_right(device_fixture: DeviceFixture, role: Role) -> None:
    under_test = BackendUnderTest(
        Mutant(role, "Right", "", caps=FULL if role == "attention" else replace(FULL, graph="never")).spec
    )
    outcomes = run_checks(under_test, checks_of(under_test, device_fixture, quick=True), device_fixture)
    assert [(o.name, o.detail) for o in outcomes if o.status not in ("passed", "note")] == []


def test_mutant_that_claims_too_little_is_noted(device_fixture: DeviceFixture) -> None:
    """It is right at head_dims, dtypes and features that it does not declare."""
    caps = replace(FULL, head_dims=OneOf(64), features=frozenset({"window"}))
    under_test = BackendUnderTest(Mutant("attention", "Right", "", caps=caps).spec)
    checks = [check for check in checks_of(under_test, device_fixture, quick=True) if check.outside]
    assert [check.name for check in checks] == ["outside/head_dim=32", "outside/head_dim=80", "outside/softcap"]
    with CheckProcess(under_test, device_fixture.facts) as process:
        outcomes = [process.run(check) for check in checks]
    assert [outcome.status for outcome in outcomes] == ["note"] * 3
    assert all("under-claimed" in outcome.detail for outcome in outcomes)
