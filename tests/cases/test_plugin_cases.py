"""Cases about choosing among plugins: what ``auto`` chooses, what a name means, and advice that works."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from minisgl_core.errors import BackendError
from minisgl_core.installation import Installed
from minisgl_core.modelconfig import ModelConfig
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import (
    ANY,
    HOST_ROLES,
    OP_NAMES,
    BackendSpec,
    Caps,
    MultipleOf,
    OneOf,
    PluginInfo,
    Role,
    hookimpl,
)
from minisgl_core.registry import (
    Candidate,
    DeviceFacts,
    Plan,
    PlanQuery,
    PluginRecord,
    Registry,
    discover,
    resolve_plan,
)
from minisgl_core.registry.explain import CandidateReport, Explanation, explain
from minisgl_core.registry.hook_validation import PluginFault, check_specs
from minisgl_core.scaffold import write_distribution
from support.settings import ANY_MODEL

pytest.importorskip("minisgl_cpu_sim")

CPU, H200 = DeviceFacts("cpu"), DeviceFacts("cuda", sm=90)
DENSE = replace(geometry("qwen3-0.6b"), dtype="bfloat16")
MOE = replace(geometry("qwen3-30b-a3b"), dtype="bfloat16")


class AllInstalled(Installed):
    """A machine on which every kernel library and compiler is installed, with the plugins as they are here."""

    def version(self, distribution: str) -> str:
        return "999"

    def has_module(self, module: str) -> bool:
        return not module.startswith("minisgl_") or super().has_module(module)

    def has_program(self, program: str) -> bool:
        return True


class NothingInstalled(Installed):
    """A machine without any kernel library."""

    def has_module(self, module: str) -> bool:
        return module.startswith("minisgl_") and super().has_module(module)


ALL: dict[str, Any] = {
    **ANY_MODEL,
    "devices": ("cpu", "cuda"),
    "sm": ANY,
    "features": ANY,
    "formats": ("plain",),
    "ops": OP_NAMES,
    "per_row_seed": True,
}


def spec(role: Role, name: str = "mine", tier: int = 0, **caps: Any) -> BackendSpec:
    """A backend that can do everything, and whose tier would put it first."""
    return BackendSpec(role=role, name=name, factory="no.such:Class", tier=tier, caps=(Caps(**{**ALL, **caps}),))


def with_stranger(*specs: BackendSpec) -> Registry:
    """The plugins that are installed here, and a distribution ``stranger`` that the core does not know."""
    installed = discover()
    offered = tuple(Candidate(one, "stranger", "1.0", index) for index, one in enumerate(specs))
    return Registry((*installed.plugins, PluginRecord("stranger", "main = stranger", candidates=offered)))


def query_of(device: DeviceFacts = H200, model: ModelConfig = DENSE, **fields: Any) -> PlanQuery:
    return PlanQuery(model, device, fields.pop("dtype", "bfloat16"), **{"graph": device.kind == "cuda", **fields})


def plan_of(registry: Registry, query: PlanQuery) -> Plan:
    return resolve_plan(query, registry, environment=AllInstalled(), prober=lambda requests: {})


def explained(registry: Registry, query: PlanQuery) -> Explanation:
    return explain(query, registry, environment=AllInstalled())


def report(answer: Explanation, entry: str, backend: str) -> CandidateReport:
    (found,) = [
        item for one in answer.entries if one.entry.label == entry for item in one.candidates if item.backend == backend
    ]
    return found


FUSED = dict.fromkeys(
    ("rms_norm", "add_rms_norm", "allreduce_add_rms_norm", "qk_norm_rope_store", "act_and_mul"), "cuda/cpp@minisgl-cuda"
)
ON_CUDA = {
    "attention.decode": "cuda_decode@minisgl-cuda",
    "kv": "cuda/cpp@minisgl-cuda",
    "graph": "cuda@minisgl-cuda",
    "moe": "fused@minisgl-moe",
    **{f"ops.{name}": label for name, label in FUSED.items()},
    "ops.route": "fused_route@minisgl-moe",
    "ops.sample": "cuda/triton@minisgl-cuda",
    "linear": "skinny@minisgl-cuda",
    "comm": "torch_dist@minisgl-core",
    "platform": "cuda@minisgl-core",
    "models": "qwen3_moe@minisgl-core",
}
ON_CPU = {
    **{f"ops.{name}": "cpu@minisgl-cpu-sim" for name in OP_NAMES},
    **dict.fromkeys(("attention.decode", "attention.prefill", "kv", "moe", "linear"), "cpu@minisgl-cpu-sim"),
    "graph": "eager@minisgl-core",
    "comm": "torch_dist@minisgl-core",
    "platform": "cpu@minisgl-core",
    "models": "qwen3_moe@minisgl-core",
}
DEFAULTS = {
    "cpu": ({**ON_CPU}, 1),
    "cpu with graphs": ({**ON_CPU, "graph": "emulated@minisgl-cpu-sim"}, 1),
    "sm80": ({**ON_CUDA, "attention.prefill": "fa/fa2@minisgl-fa"}, 256),
    "sm89": ({**ON_CUDA, "attention.prefill": "fa/fa2@minisgl-fa"}, 256),
    "sm90": ({**ON_CUDA, "attention.prefill": "fa/fa3@minisgl-fa"}, 1),
    "sm90 without graphs": ({**ON_CUDA, "attention.prefill": "fa/fa3@minisgl-fa", "graph": "eager@minisgl-core"}, 1),
    "sm100": ({**ON_CUDA, "attention.prefill": "fa/fa4@minisgl-fa"}, 128),
    "sm120": ({**ON_CUDA, "attention.prefill": "flashinfer@minisgl-flashinfer"}, 1),
}


@pytest.mark.parametrize("machine", DEFAULTS)
def test_case_120_the_defaults_of_each_device_are_these(machine: str) -> None:
    """The planted fault "order of H200 defaults" changes them."""
    backends, page_size = DEFAULTS[machine]
    device = (
        CPU
        if machine.startswith("cpu")
        else DeviceFacts("cuda", sm=int(machine.split(maxsplit=1)[0].removeprefix("sm")))
    )
    plan = plan_of(discover(), query_of(device, MOE, graph="without" not in machine and machine != "cpu"))
    found = {entry: label for entry, label in plan.summary().items() if entry.partition(".")[0] not in HOST_ROLES}
    assert found == backends and plan.page_size == page_size


ROLES: tuple[Role, ...] = ("attention", "kv", "graph", "moe", "ops", "linear", "comm")


@pytest.mark.parametrize("device", [CPU, H200], ids=str)
@pytest.mark.parametrize("role", ROLES)
def test_case_120_an_installed_stranger_changes_nothing_and_explain_says_why(role: Role, device: DeviceFacts) -> None:
    query, registry = query_of(device, MOE, graph=True), with_stranger(spec(role))
    assert plan_of(registry, query) == plan_of(discover(), query)
    answer = explained(registry, query)
    for entry in (one for one in answer.entries if one.entry.role == role):
        (chosen,) = [item.backend for item in entry.candidates if item.status == "chosen"]
        (mine,) = [item for item in entry.candidates if item.backend == "mine@stranger"]
        assert mine.status == "fits"
        assert mine.preferred.startswith(f"{chosen} is preferred because auto takes a backend of stranger only where")


def test_case_120_a_pool_that_only_a_stranger_could_serve_does_not_draw_it_in() -> None:
    """With its kv backend pages of 67 would serve the first attention backend; without it the second one serves."""
    kv, other = spec("kv", "k"), spec("attention", "second", tier=20)
    ours = [
        Candidate(spec("attention", "first", tier=1, page_sizes=OneOf(67)), "minisgl-fa", "1"),
        Candidate(other, "minisgl-flashinfer", "1"),
        Candidate(spec("kv", "coarse", page_sizes=MultipleOf(64)), "minisgl-cuda", "1"),
    ]
    core = next(plugin for plugin in discover().plugins if plugin.distribution == "minisgl-core")
    known = (core, PluginRecord("minisgl-cuda", "", candidates=tuple(ours)))
    before = plan_of(Registry(known), query_of(CPU, page_size="auto"))
    more = PluginRecord("stranger", "", candidates=(Candidate(kv, "stranger", "1"),))
    assert plan_of(Registry((*known, more)), query_of(CPU, page_size="auto")) == before


@pytest.mark.parametrize(
    "chosen_by",
    [
        {"backends": {"linear": "mine"}},
        {"backends": {"linear": ["mine", "auto"]}},
        {"allow": ["stranger", "minisgl-cpu-sim", "minisgl-cuda", "minisgl-fa", "minisgl-flashinfer", "minisgl-moe"]},
        {"calibration": {"linear": {"mine@stranger": 1.0, "cpu": 1.5}}},
    ],
    ids=["named", "listed", "allowed", "measured"],
)
def test_case_120_a_stranger_that_is_named_listed_or_measured_is_chosen(chosen_by: dict[str, Any]) -> None:
    plan = plan_of(with_stranger(spec("linear")), query_of(CPU, **chosen_by))
    assert plan.choice("linear").label == "mine@stranger"


def test_case_120_a_stranger_serves_where_no_incumbent_fits_unless_it_loses_precision() -> None:
    model = replace(DENSE, architecture="NewForCausalLM")
    family = spec("models", "new", architectures=("NewForCausalLM",))
    assert plan_of(with_stranger(family), query_of(CPU, model)).choice("models").label == "new@stranger"
    lossy = spec("models", "new", architectures=("NewForCausalLM",), tolerance=0.01)
    with pytest.raises(BackendError, match=r"tolerance: wanted nothing lost unless it is named, supported 0\.01"):
        plan_of(with_stranger(lossy), query_of(CPU, replace(model)))
    named = query_of(CPU, model, backends={"models": "new"})
    assert plan_of(with_stranger(lossy), named).choice("models").label == "new@stranger"


@pytest.mark.parametrize("role", ROLES)
def test_case_120_tier_decides_among_incumbents_in_every_role(role: Role) -> None:
    for tier, first in ((-1, True), (1000, False)):
        installed = discover()
        rival = Candidate(spec(role, "rival", tier=tier), "minisgl-cuda", "1.0", 99)
        registry = Registry((*installed.plugins, PluginRecord("minisgl-cuda", "again", candidates=(rival,))))
        plan, answer = plan_of(registry, query_of(H200, MOE)), explained(registry, query_of(H200, MOE))
        buckets = [bucket for bucket in plan.buckets if bucket.entry.role == role]
        assert {bucket.choice.name == "rival" for bucket in buckets} == {first}
        for bucket in buckets:
            (entry,) = [one for one in answer.entries if one.entry == bucket.entry]
            losers = [item for item in entry.candidates if item.status == "fits"]
            assert all(item.preferred.startswith(f"{bucket.choice.label} is preferred because ") for item in losers)
            assert not first or all(
                " its tier is -1, that of " in item.preferred or " seed for each row" in item.preferred
                for item in losers
            )


def test_case_121_naming_a_kv_backend_makes_it_write() -> None:
    registry = with_stranger(spec("kv"))
    assert plan_of(registry, query_of()).pool_writer.label == "cuda/cpp@minisgl-cuda"
    plan = plan_of(registry, query_of(backends={"kv": "mine"}))
    assert plan.choice("ops", op="qk_norm_rope_store").label == "composed@minisgl-core"
    assert (plan.pool_writer.role, plan.pool_writer.label) == ("kv", "mine@stranger")
    assert plan.choice("ops", op="rms_norm").label == "cuda/cpp@minisgl-cuda", "the others stay as they were"
    both = plan_of(with_stranger(spec("kv"), spec("ops")), query_of(backends={"kv": "mine"}))
    assert (both.pool_writer.role, both.pool_writer.label) == ("ops", "mine@stranger"), "of the same distribution"
    whole = plan_of(registry, query_of(backends={"kv": "mine", "ops": "cuda"}))
    assert whole.pool_writer.label == "mine@stranger" and "qk_norm_rope_store" in " ".join(whole.fallbacks)
    op = plan_of(registry, query_of(backends={"kv": "mine", "ops": {"qk_norm_rope_store": "cuda"}}))
    assert op.pool_writer.label == "cuda/cpp@minisgl-cuda", "config names the operation itself"
    unused = report(
        explained(registry, query_of(backends={"kv": "mine"})), "ops.qk_norm_rope_store", "cuda/cpp@minisgl-cuda"
    )
    assert "kv: wanted one that stores through stranger's kv backend" in str(unused.reasons[0])
    first = plan_of(registry, query_of(backends={"kv": ["mine", "cuda"]}))
    assert first.pool_writer.label == "mine@stranger"
    broken = with_stranger(spec("kv", dtypes=("float16",)))
    assert plan_of(broken, query_of(backends={"kv": ["mine", "cuda"]})).pool_writer.label == "cuda/cpp@minisgl-cuda"
    assert plan_of(broken, query_of(backends={"kv": ["mine", "auto"]})).pool_writer.label == "cuda/cpp@minisgl-cuda"


PLUGIN = """
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, PluginInfo, hookimpl

MINISGL_PLUGIN = PluginInfo(name="raises", api={"kv": ">=1,<2"})

@hookimpl
def minisgl_kv_kernels():
    caps = Caps(devices=("cpu",), dtypes=ANY, kv_dtypes=ANY, head_dims=ANY, page_sizes=ANY, kv_layouts=("NHD",))
    return [BackendSpec(role="kv", name="raises", factory="raises_kv:Raises", caps=(caps,))]
"""
BACKEND = """
from minisgl_cpu_sim.pure.kv import TorchKV

class Raises(TorchKV):
    def store(self, *arguments):
        raise RuntimeError("this store was called")
"""


@pytest.fixture
def raising_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution whose kv backend raises when it is to write."""
    (tmp_path / "raises_plugin.py").write_text(PLUGIN)
    (tmp_path / "raises_kv.py").write_text(BACKEND)
    info = tmp_path / "raises-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raises\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minisgl]\nmain = raises_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_case_121_a_named_store_that_raises_is_called(
    raising_kv: None, small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from minisgl_core.cli.app import main
    from minisgl_core.core import SamplingParams
    from minisgl_core.llm import LLM

    settings: dict[str, Any] = {"device": "cpu", "max_running_req": 2, "num_page_override": 64, "progress": False}
    with LLM(small, **settings) as llm:
        plain = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), progress=False)
        assert plain[0]["token_ids"], "it is not called unless it is named"
    with (
        pytest.raises(Exception, match="this store was called"),
        LLM(small, backends={"kv": "raises"}, **settings) as llm,
    ):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), progress=False)
    assert main(["explain", "--model", str(small), "--device", "cpu", "--backend", "kv=raises"]) == 0
    assert "kv:raises@raises writes the KV pool" in capfd.readouterr().out


class Fake(Distribution):
    """A distribution whose module is in memory, and which requires ``minisgl-core``."""

    def __init__(self, requires: str) -> None:
        self.files_ = {
            "METADATA": f"Metadata-Version: 2.1\nName: other\nVersion: 1.0\nRequires-Dist: {requires}\n",
            "entry_points.txt": "[minisgl]\nmain = other_plugin\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.files_.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path("/fake") / path


@pytest.mark.parametrize(
    ("core", "requires", "api", "failure"),
    [
        ("0.2.0", "minisgl-core>=0.1", ">=1,<2", ""),
        ("9.0.0", "minisgl-core>=0.1", ">=1,<2", ""),
        ("0.2.0", "minisgl-core<0.2,>=0.1", ">=1,<2", "it requires minisgl-core<0.2,>=0.1, this is minisgl-core 0.2.0"),
        ("0.2.0", "minisgl-core>=0.1", ">=2,<3", "it needs kv API >=2,<3, this core serves 1.0"),
    ],
)
def test_case_123_the_ranges_of_role_apis_decide(
    monkeypatch: pytest.MonkeyPatch, core: str, requires: str, api: str, failure: str
) -> None:
    hook: Any = hookimpl(lambda: [spec("kv")])
    module = ModuleType("other_plugin")
    vars(module).update(MINISGL_PLUGIN=PluginInfo("other", {"kv": api}), minisgl_kv_kernels=hook)
    monkeypatch.setitem(sys.modules, "other_plugin", module)
    monkeypatch.setattr(sys.modules["minisgl_core.registry.discover"], "__version__", core)
    (record,) = [one for one in discover([Fake(requires)]).plugins if one.distribution == "other"]
    assert record.failure == failure


def test_case_123_our_plugins_and_new_ones_do_not_pin_the_minor_version_of_the_core(tmp_path: Path) -> None:
    write_distribution("mine", "kv", tmp_path / "mine", discover())
    root = Path(__file__).parents[2]
    for project in (tmp_path / "mine" / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")):
        names = [Requirement(one) for one in tomllib.loads(project.read_text())["project"]["dependencies"]]
        (core,) = [one for one in names if one.name == "minisgl-core"]
        assert core.specifier.contains("0.2.0") and core.specifier.contains("1.0"), project


def test_case_124_an_unqualified_name_stays_with_the_incumbent() -> None:
    registry = with_stranger(spec("attention", "cpu"))
    query = query_of(CPU)
    assert plan_of(registry, query) == plan_of(discover(), query)
    named = plan_of(registry, query_of(CPU, backends={"attention": "cpu"}))
    assert {choice.label for choice in named.choices("attention")} == {"cpu@minisgl-cpu-sim"}
    with pytest.raises(BackendError, match="you named cpu for attention; it needs CPU"):
        plan_of(registry, query_of(H200, backends={"attention": "cpu"}))
    qualified = plan_of(registry, query_of(CPU, backends={"attention": "cpu@stranger"}))
    assert {choice.label for choice in qualified.choices("attention")} == {"cpu@stranger"}
    stranger = report(explained(registry, query), "attention.decode", "cpu@stranger")
    assert (stranger.status, stranger.reasons) == ("fits", ())
    costs = {"attention.decode": {"cpu": 1.0}}
    assert plan_of(registry, query_of(CPU, calibration=costs)).choice("attention", phase="decode").label == (
        "cpu@minisgl-cpu-sim"
    )


def test_case_124_options_follow_the_name() -> None:
    registry = with_stranger(replace(spec("attention", "cpu"), options="no.such:Model"))
    options = {"attention:cpu@stranger": {"split": 2}}
    fields: dict[str, Any] = {"backends": {"attention": "cpu@stranger"}, "options": options}
    plan = plan_of(registry, query_of(CPU, **fields))
    assert plan.choice("attention", phase="decode").options == {"split": 2}
    stock = plan_of(registry, query_of(CPU, options=options))
    assert stock.choice("attention", phase="decode").options == {}


@pytest.mark.parametrize("environment", [AllInstalled(), NothingInstalled()], ids=["installed", "not installed"])
def test_case_129_a_name_in_vain_says_so_in_its_first_line(environment: Installed) -> None:
    query = query_of(CPU, DENSE, dtype="float32", backends={"attention": "fa"})
    with pytest.raises(BackendError) as refused:
        resolve_plan(query, discover(), environment=environment, prober=lambda requests: {})
    first, *details = str(refused.value).splitlines()
    assert first == "you named fa for attention; it needs CUDA; leave it out, or use cpu or torch"
    assert details[0].strip().startswith("no backend for attention.decode (Qwen3ForCausalLM in float32 on cpu)")
    assert [line.split(":")[0].strip() for line in details[1:]] == [f"fa/fa{n}@minisgl-fa" for n in (3, 4, 2)]
    for name in ("cpu", "torch"):
        plan_of(discover(), query_of(CPU, DENSE, dtype="float32", backends={"attention": name}))


QUESTIONS: list[tuple[str, PlanQuery]] = [
    ("a float32 model on an H200", query_of(dtype="float32")),
    ("a window", query_of(model=replace(DENSE, windows=(None, 512)))),
    ("graphs", query_of(CPU, backends={"graph": "emulated"}, graph=True)),
    ("a page that is too small", query_of(DeviceFacts("cuda", sm=80), page_size=16)),
    ("a Blackwell", query_of(DeviceFacts("cuda", sm=100), MOE, page_size=16)),
    ("a name in vain", query_of(CPU, dtype="float32", backends={"attention": "fa"})),
    ("a dtype in vain", query_of(dtype="float32", backends={"attention": {"prefill": "fa"}})),
    ("an old card", query_of(DeviceFacts("cuda", sm=75))),
    ("a named kv", query_of(CPU, backends={"kv": "mine"})),
]
STRANGERS = (
    spec("kv"),
    spec("attention", "cpu", dtypes=("float16",), graph="never"),
    spec("attention", "plain", features=frozenset(), page_sizes=MultipleOf(48)),
    replace(spec("attention", "needy", page_sizes=OneOf(48)), requires=("no-such-thing>=1",)),
    spec("linear", "lossy", tolerance=0.05),
)


def advice(answer: Explanation) -> Iterator[tuple[Any, CandidateReport, str]]:
    return (
        (entry.entry, item, text) for entry in answer.entries for item in entry.candidates for text in item.would_allow
    )


def followed(query: PlanQuery, text: str) -> PlanQuery:
    """The query of a user who types this."""
    for part in (part for part in text.split(" and ") if not part.startswith("pip install")):
        key, value = part.split("=")
        role, _, narrowed = key.removeprefix("backends.").partition(".")
        change: dict[str, Any] = {
            "page_size": {"page_size": value},
            "dtype": {"dtype": value},
            "cuda_graph_max_bs": {"graph": value != "0"},
            "max_seq_len_override": {"max_seq_len": value},
        }.get(key) or {
            "backends": {**query.backends, role: {**as_table(query, role), narrowed: value} if narrowed else value}
        }
        query = replace(
            query, **{name: int(v) if isinstance(v, str) and v.isdigit() else v for name, v in change.items()}
        )
    return query


def as_table(query: PlanQuery, role: str) -> dict[str, Any]:
    given = query.backends.get(role, {})
    return dict(given) if isinstance(given, dict) else {"*": given}


@pytest.mark.parametrize(("about", "query"), QUESTIONS, ids=[about for about, _ in QUESTIONS])
def test_case_122_each_piece_of_advice_works_when_it_is_typed(about: str, query: PlanQuery) -> None:
    registry = with_stranger(*STRANGERS)
    answer = explained(registry, query)
    given = list(advice(answer))
    assert given, about
    for entry, item, text in given:
        again = explain(followed(query, text), registry, environment=AllInstalled())
        (now,) = [
            one
            for other in again.entries
            if other.entry == entry
            for one in other.candidates
            if one.backend == item.backend
        ]
        assert (now.reasons, now.status in ("chosen", "fits")) == ((), True), f"{entry.label} {item.backend}: {text}"
        assert again.plan is not None or answer.plan is None, f"{text} leaves no plan"
    assert not any("kv_dtype" in text for *_, text in given)
    assert not any(reason.fix for one in answer.entries for item in one.candidates for reason in item.reasons)


def test_case_122_what_the_device_excludes_is_not_advised() -> None:
    answer = explained(discover(), query_of(CPU, dtype="float32", backends={"attention": "fa"}))
    assert [item for _, item, _ in advice(answer) if item.backend.startswith("fa")] == []
    assert "would do" not in answer.error


def test_case_122_a_window_is_the_longest_length_that_needs_no_window() -> None:
    """The planted fault "a counterfactual with the wrong length"."""
    registry, model = with_stranger(*STRANGERS), replace(DENSE, windows=(512, 256, None))
    plain = report(explained(registry, query_of(CPU, model, page_size=48)), "attention.decode", "plain@stranger")
    assert plain.would_allow == ("max_seq_len_override=256",)
    for length, fits in ((256, True), (257, False)):
        answer = explained(registry, query_of(CPU, model, page_size=48, max_seq_len=length))
        assert (not report(answer, "attention.decode", "plain@stranger").reasons) is fits


@pytest.mark.parametrize("name", ["auto", "Auto", "", "a@b", "a/b", "a=b", "a,b", "a b", "*", "-a", "a:b"])
def test_case_127_a_name_that_could_not_be_typed_is_refused(name: str) -> None:
    with pytest.raises(PluginFault, match=r"^the spec kv:.*: name is "):
        check_specs("minisgl_kv_kernels", [spec("kv", name)])
    assert check_specs("minisgl_kv_kernels", [spec("kv", "automatic")])


def test_case_127_a_word_that_nothing_requests_is_noted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = {"features": frozenset({"windw", "window"}), "formats": ("plain", "int3")}
    hook: Any = hookimpl(lambda: [spec("kv", **caps)])
    module = ModuleType("other_plugin")
    vars(module).update(MINISGL_PLUGIN=PluginInfo("other", {"kv": ">=1,<2"}), minisgl_kv_kernels=hook)
    monkeypatch.setitem(sys.modules, "other_plugin", module)
    texts = {note.text for note in discover([Fake("torch")]).notes}
    assert texts == {
        "its kv:mine lists 'windw' in features, which this core never requests; did you mean 'window'?",
        "its kv:mine lists 'int3' in formats, which this core never requests",
    }


def test_what_config_denies_is_never_chosen(small: Path) -> None:
    """The planted fault "`deny` of the config not handed to resolving"."""
    from minisgl_core.llm import LLM

    with pytest.raises(BackendError, match=r"plugins\.deny keeps out minisgl-cpu-sim"):
        LLM(small, device="cpu", deny_plugins=["minisgl-cpu-sim"], num_page_override=16, progress=False)
    for denied in (query_of(CPU, deny=["minisgl-cpu-sim"]), query_of(CPU, allow=["minisgl-cuda"])):
        with pytest.raises(BackendError, match=r"keeps out .*minisgl-cpu-sim"):
            plan_of(discover(), denied)
