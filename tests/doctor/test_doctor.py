from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.doctor.backends import check_code, check_requirements
from minisgl_core.doctor.diagnosis import ImportCost, _cost_findings
from minisgl_core.doctor.machine import Machine, check_memory, weight_bytes
from minisgl_core.doctor.metadata import check_requires
from minisgl_core.doctor.plans import plans_of_ranks
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import BackendSpec, CannotRun, Reason
from minisgl_core.registry import Candidate, DeviceFacts, PlanQuery, discover

pytest.importorskip("minisgl_cpu_sim")

GONE = "it is a development install of {}, which is gone"


def test_a_sound_installation_is_well_and_each_rank_has_its_plan(commands: Any) -> None:
    code, findings, data = commands.diagnose("--geometry", "qwen3-0.6b", "--tp-size", "2", also=["minisgl-cpu-sim"])
    assert (code, findings, data["well"]) == (0, [], True)
    (plugin,) = data["plugins"]
    assert (
        plugin["distribution"] == "minisgl-cpu-sim" and plugin["heavy_imports"] == [] and plugin["device_use"] is None
    )
    assert 0 < plugin["import_ms"] < 5000
    assert [(rank["rank"], rank["q_heads"], rank["kv_heads"]) for rank in data["ranks"]] == [(0, 8, 4), (1, 8, 4)]
    assert data["ranks"][0]["digest"] == data["ranks"][1]["digest"]
    assert data["ranks"][0]["backends"]["attention.decode"].endswith("@minisgl-cpu-sim")
    machine = data["machine"]
    assert machine["devices"] == ["cpu"] and machine["free_bytes"][0] > 0 and machine["torch"]


def test_a_line_for_each_finding_says_what_to_do(commands: Any, break_with: Callable[..., str]) -> None:
    name = break_with("hook_raises")
    commands.diagnose()  # leaves all our own plugins denied
    code, out, err = commands.run("doctor", "--device", "cpu", "--geometry", "qwen3-0.6b")
    assert code == 1 and "broken_hook_raises" in out
    wrong = [line for line in out.splitlines() if line.startswith("wrong")]
    assert wrong[0] == (
        f"wrong  {name}: it is not used: ValueError: no kernels for this machine; "
        f'pip install --force-reinstall {name}, pip uninstall {name}, or set [plugins] deny = ["{name}"]'
    )
    assert wrong[1].startswith("wrong  rank 0: no backend for attention") and out.endswith("2 wrong, 0 to note\n")
    assert "Traceback" not in out + err


def test_an_entry_point_whose_module_is_gone_is_stale_metadata(
    commands: Any, break_with: Callable[..., str], site: Path
) -> None:
    name = break_with("hook_raises")
    (site / "broken_hook_raises.py").unlink()
    code, (finding,), _ = commands.diagnose()
    assert code == 1 and (finding["check"], finding["about"]) == ("metadata", name)
    assert finding["text"] == "its entry point names the module broken_hook_raises, which is not there"
    assert finding["remedy"] == f"pip uninstall {name}, or install it again"


def test_a_development_install_whose_folder_is_gone_is_said_once(
    commands: Any, break_with: Callable[..., str], tmp_path: Path
) -> None:
    name = break_with("hook_raises", editable=tmp_path / "moved away")
    code, (finding,), _ = commands.diagnose()
    assert code == 1 and finding["text"] == GONE.format(tmp_path / "moved away")
    assert finding["remedy"].startswith(f"pip uninstall {name}")


def test_a_stale_egg_info_that_hides_the_installed_version_is_found(
    commands: Any, break_with: Callable[..., str], site: Path, tmp_path: Path
) -> None:
    name = break_with("lying_factory", version="2.0")
    stale = tmp_path / "checkout" / "broken_lying_factory.egg-info"
    stale.mkdir(parents=True)
    (stale / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    shutil.copy(next(site.glob("*.dist-info")) / "entry_points.txt", stale)
    commands.monkeypatch.syspath_prepend(stale.parent)
    code, findings, _ = commands.diagnose()
    first = findings[0]
    assert code == 1 and (first["check"], first["about"]) == ("metadata", name)
    assert first["text"] == f"metadata 1.0 at {stale.parent} hides 2.0 at {site}"
    assert first["remedy"].startswith("remove the stale one")


def test_metadata_that_is_there_twice_is_found(commands: Any, break_with: Callable[..., str], site: Path) -> None:
    name = break_with("lying_factory")
    shutil.copytree(next(site.glob("*.dist-info")), site / "broken_lying_factory-0.9.dist-info")
    _, findings, _ = commands.diagnose()
    (finding,) = [one for one in findings if one["check"] == "metadata"]
    assert finding["about"] == name and "holds its metadata twice: " in finding["text"]
    assert "0.9.dist-info" in finding["text"] and "1.0.dist-info" in finding["text"]


def test_a_module_that_python_finds_elsewhere_is_found(
    commands: Any, break_with: Callable[..., str], site: Path, tmp_path: Path
) -> None:
    name = break_with("lying_factory")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(site / "broken_lying_factory.py", elsewhere)
    commands.monkeypatch.syspath_prepend(elsewhere)
    _, findings, _ = commands.diagnose()
    (finding,) = [one for one in findings if one["check"] == "metadata"]
    assert finding["about"] == name
    assert finding["text"] == (
        f"it is installed in {site}, but Python imports its module from {elsewhere / 'broken_lying_factory.py'}"
    )


def test_a_plugin_for_another_core_and_an_unmet_dependency_are_found(
    commands: Any, break_with: Callable[..., str]
) -> None:
    break_with("lying_factory", requires=["minisgl-core>=99"])
    _, (finding,), _ = commands.diagnose()
    assert "it requires minisgl-core>=99, this is minisgl-core" in finding["text"]
    other = break_with("old_requirement", requires=["no-such-kernels>=3", "pluggy>=1000", "x; extra == 'test'"])
    _, findings, _ = commands.diagnose()
    texts = [one["text"] for one in findings if one["about"] == other]
    assert texts[0] == "it needs no-such-kernels>=3, no-such-kernels is not installed"
    assert texts[1].startswith("it needs pluggy>=1000, pluggy is 1.") and len(texts) == 2


class Nothing:
    """An environment without anything but torch 2.9."""

    def version(self, distribution: str) -> str | None:
        return "2.9" if distribution == "torch" else None

    def has_module(self, module: str) -> bool:
        return False

    def has_program(self, program: str) -> bool:
        return False


def _offer(name: str, requires: tuple[Any, ...], variant: str = "") -> Candidate:
    return Candidate(BackendSpec("attention", name, "pkg.mod:C", variant, requires=requires), "dist", "1")


def test_a_missing_variant_is_a_note_while_another_serves_the_name() -> None:
    both = [_offer("fa", ("flash_attn>=2",), "fa2"), _offer("fa", ("torch>=2.8",), "fa3")]
    (note,) = check_requirements(both, Nothing())
    assert (note.level, note.about) == ("note", "attention:fa/fa2@dist")
    (alone,) = check_requirements(both[:1], Nothing())
    assert alone.level == "wrong" and alone.remedy == "pip install 'flash_attn>=2'"


def test_what_a_plugin_itself_lacks_is_no_fault_of_this_machine() -> None:
    (note,) = check_requirements([_offer("x", ("import:pkg.kernels",))], Nothing())
    assert (note.level, note.remedy) == ("note", "wait for a release that has it")
    (compiler,) = check_requirements([_offer("x", (("exec:g++", "exec:c++"),))], Nothing())
    assert compiler.level == "wrong" and compiler.remedy == "install g++ or install c++"


def test_a_check_that_says_no_is_wrong_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise CannotRun(Reason("no-compiler", "compiler", "one", "none", "install one"))

    monkeypatch.setattr("minisgl_core.env.refuse", refuse, raising=False)
    offer = _offer("x", ())
    checked = replace(offer, spec=replace(offer.spec, check="minisgl_core.env:refuse"))
    (finding,) = check_requirements([checked], Nothing())
    assert (finding.level, finding.check, finding.about) == ("wrong", "requirement", checked.key)
    assert (finding.text, finding.remedy) == ("compiler: it wants one, found none", "install one")


def test_requirements_of_extras_and_of_the_core_are_not_asked_here() -> None:
    lines = ["minisgl-core>=99", "absent; extra == 'dev'", "torch>=2.8", "absent; python_version < '3'"]
    assert list(check_requires("x", lines, Nothing())) == []


def test_what_does_not_answer_may_be_given_longer(commands: Any, site: Path, break_with: Callable[..., str]) -> None:
    name = break_with("lying_factory")
    (site / "broken_lying_factory.py").write_text("import time\ntime.sleep(60)\n")
    code, (finding,), _ = commands.diagnose("--timeout", "1")
    assert code == 1 and finding["text"] == "importing broken_lying_factory, the process did not answer within 1 s"
    assert finding["remedy"].startswith("give it longer with --timeout SECONDS; if it never ends, pip uninstall")
    offer = Candidate(BackendSpec("attention", "slow", "broken_lying_factory:C"), name, "1")
    (finding,) = check_code([offer], Nothing(), timeout_s=1.0)
    assert finding.text == "loading broken_lying_factory:C, the process did not answer within 1 s"
    assert finding.remedy.startswith("give it longer with --timeout") and "reinstall" not in finding.remedy


def test_import_costs_are_judged() -> None:
    slow = list(_cost_findings(ImportCost("d", "m", 250.0)))
    assert [(one.level, one.text) for one in slow] == [("note", "importing m takes 250 ms")]
    heavy = list(_cost_findings(ImportCost("d", "m", 250.0, ("torch", "triton"))))
    assert [(one.level, one.text) for one in heavy] == [("wrong", "importing m imports torch, triton, 250 ms")]
    assert list(_cost_findings(ImportCost("d", "m", 20.0))) == []


CUDA = [DeviceFacts("cuda", sm=90), DeviceFacts("cuda", sm=80)]
BY_NAME = {
    "attention": "torch",
    "kv": "torch",
    "graph": "eager",
    "ops": "composed",
    "linear": "plain",
    "comm": "torch_dist",
}


def _query(tp_size: int) -> PlanQuery:
    return PlanQuery(geometry("qwen3-0.6b"), CUDA[0], "bfloat16", tp_size=tp_size, backends=BY_NAME)


def test_a_rank_without_a_device_is_found() -> None:
    ranks, findings = plans_of_ranks(_query(4), discover(), [CUDA[0], CUDA[0]])
    assert [rank.rank for rank in ranks] == [0, 1]
    assert [finding.about for finding in findings] == ["rank 2", "rank 3"]
    assert findings[0].remedy == "use --tp-size 2"


def test_unequal_devices_are_found() -> None:
    ranks, (finding,) = plans_of_ranks(_query(2), discover(), CUDA)
    assert [rank.device for rank in ranks] == ["cuda sm90", "cuda sm80"]
    assert finding.about == "rank 1" and "its cuda sm80 would get plan" in finding.text


def test_weights_that_do_not_fit_are_found(tmp_path: Path) -> None:
    for part, size in (("a", 3000), ("b", 2000)):
        (tmp_path / f"{part}.safetensors").write_bytes(b"0" * size)
    assert weight_bytes(tmp_path) == 5000 and weight_bytes(tmp_path / "a.safetensors") == 3000
    host = Machine("3", "2", (DeviceFacts("cpu"),), (4000,), "")
    assert [one.about for one in check_memory(host, 5000, 2)] == ["host"]
    assert check_memory(host, 4000, 2) == []
    two = Machine("3", "2", tuple(CUDA), (2000, 3000), "")
    assert [one.about for one in check_memory(two, 5000, 2)] == ["rank 0"]
