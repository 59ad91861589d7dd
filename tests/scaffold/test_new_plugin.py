from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.cli.app import main
from minisgl_core.plugin_api import Caps
from minisgl_core.registry import Registry, discover
from minisgl_core.scaffold import SCAFFOLDED_ROLES, Scaffold, write_distribution
from minisgl_core.testing import BackendUnderTest, DeviceFixture, GraphCheck, checks_of

pytest.importorskip("minisgl_cpu_sim")

from minisgl_cpu_sim.graph import EmulatedGraph

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
LINES = {"attention": 100, "moe": 60, "parser": 110}
"""Promised at most, tests included."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover()


@pytest.mark.slow  # `.ci/run` does the same with each role's scaffold
@pytest.mark.parametrize("role", SCAFFOLDED_ROLES)
def test_a_scaffold_is_built_installed_tested_verified_and_generates_the_same_tokens(
    role: Any, registry: Registry, site: Any, same_tokens: Any, tmp_path: Path
) -> None:
    made = write_distribution(f"demo_{role}", role, tmp_path / "made", registry)
    wheel = site.install(made.folder)
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.endswith(".py")}
    assert modules == {f"{made.package}/{name}.py" for name in ("__init__", "plugin", role)}
    some = ("-k", "contract or ragged or replay or forward") if role in LINES else ()
    site.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *some, str(made.folder))
    thorough = ("--check", "contract") if role in LINES else ("--quick",)
    report = json.loads(site.run("minisgl", "verify", f"{role}:{made.name}", "--json", *thorough).stdout)
    assert report["passed"] and report["checks"]["passed"] >= 4
    same_tokens(role, made.name, made.backend_flags)
    assert f"{made.name}@{made.distribution}" in site.run(*shlex.split(made.explain), "--device", "cpu").stdout
    if role == "moe":  # the demo model has no experts, so what is typed next brings its own
        err = site.run(*shlex.split(made.serve), "--repeat", "1", "--device", "cpu").stderr
        assert f"moe={made.name}@{made.distribution}" in err


@pytest.mark.slow
@pytest.mark.parametrize("role", LINES)
def test_a_scaffold_passes_all_its_tests_and_the_whole_report_card(
    role: Any, registry: Registry, site: Any, tmp_path: Path
) -> None:
    made = write_distribution(f"demo_{role}", role, tmp_path / "made", registry)
    site.install(made.folder)
    site.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made.folder))
    report = json.loads(site.run("minisgl", "verify", f"{role}:demo_{role}", "--json").stdout)
    assert report["passed"] and report["checks"]["note"] == 0


@pytest.mark.parametrize("role", ["attention", pytest.param("moe", marks=pytest.mark.slow)])
def test_the_scaffold_of_0_1_still_works_on_this_core(role: str, site: Any, same_tokens: Any) -> None:
    folder, name = FIXTURES / "scaffold_0_1" / role, f"frozen_{role}"
    site.install(folder)
    site.run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "contract or ragged or forward", str(folder)
    )
    same_tokens(role, name, f"--backend {role}={name}")


@pytest.mark.parametrize("role", SCAFFOLDED_ROLES)
def test_what_to_type_next_serves_the_role_with_an_answer_that_ends(role: Any, tmp_path: Path) -> None:
    made = Scaffold("mine", role, tmp_path)
    assert made.backend_flags in made.serve and made.serve.count("--backend") == made.backend_flags.count("--backend")
    assert made.serve.endswith(" --max-tokens 16") or ("bench latency --short" in made.serve and role == "moe")
    readme = made.contents()["README.md"]
    assert f"\n{made.explain}\n{made.serve}\n```\n" in readme and "$" not in readme


@pytest.mark.parametrize("role", SCAFFOLDED_ROLES)
def test_what_is_written_is_short_and_clean(role: Any, tmp_path: Path) -> None:
    made = Scaffold("a_name_of_some_length", role, tmp_path)
    for path, text in made.contents().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    lines = [line for path in tmp_path.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) <= LINES.get(role, 80)
    ruff = str(Path(sys.executable).with_name("ruff"))
    for check in (("format", "--check"), ("check", "--select", "E,F,I,B,UP,W,RUF")):
        done = subprocess.run([ruff, *check, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_command_says_what_it_wrote_and_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "demo_kv", "--role", "kv"]) == 0
    *paths, _, last = capsys.readouterr().out.splitlines()
    assert all(Path(path).is_file() for path in paths)
    assert len(paths) == sum(path.is_file() for path in tmp_path.rglob("*")) == 6
    assert last == (
        "next: pip install -e minisgl_demo_kv && minisgl verify kv:demo_kv"
        ' && minisgl generate --backend kv=demo_kv --prompt "The capital of France is" --max-tokens 16'
    )
    assert main(["new-plugin", "demo_kv", "--role", "kv", "--out", "other", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "kv:demo_kv" and data["distribution"] == "minisgl-demo-kv"
    assert data["folder"] == str(tmp_path / "other")
    assert sorted(data["files"]) == sorted(
        str(path.relative_to(tmp_path / "other")) for path in (tmp_path / "other").rglob("*") if path.is_file()
    )


def test_an_empty_folder_may_be_given_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["new-plugin", "mine", "--role", "ops", "--out"]
    assert main([*arguments, str(empty)]) == 0
    (empty / "README.md").write_text("my own words")
    capsys.readouterr()
    assert main([*arguments, str(empty)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {str(empty)!r} exists and is not an empty folder; nothing is overwritten")
    assert (empty / "README.md").read_text() == "my own words"
    (tmp_path / "file").write_text("")
    assert main([*arguments, str(tmp_path / "file")]) == 2


@pytest.mark.parametrize("inside", [Path("file"), Path("file", "made"), Path("file", "new", "made"), Path("x" * 300)])
def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_left(
    inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new-plugin", "mine", "--role", "kv", "--out", str(tmp_path / inside)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the plugin cannot be written to {str(tmp_path / inside)!r}: ")
    assert error.endswith("; name a folder that you may write to\n")
    assert list(tmp_path.rglob("*")) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("name", "role", "message"),
    [
        ("Mine", "kv", "is no name for a backend; use lower-case letters"),
        ("my-kv", "kv", "is no name for a backend"),
        ("9fast", "kv", "is no name for a backend"),
        ("fast_", "kv", "is no name for a backend"),
        ("so__fast", "kv", "is no name for a backend"),
        ("../up", "kv", "is no name for a backend"),
        ("_fast", "kv", "is no name for a backend"),
        ("", "kv", "is no name for a backend"),
        ("x", "kv", "NAME 'x' is too short; use two characters or more"),
        ("lambda", "kv", "NAME 'lambda' is a keyword of Python; choose another name"),
        ("auto", "kv", "NAME 'auto' means any backend, wherever one is chosen; choose another name"),
        ("core", "kv", "is taken: there is a package minisgl_core; choose another name, or uninstall it"),
        ("eager", "graph", "is taken: minisgl-core offers graph:eager; choose another name"),
        ("mine", "linear", "Invalid value for '--role': 'linear' is not one of"),
    ],
)
def test_names_that_cannot_be_used_are_refused_and_nothing_is_written(
    name: str, role: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["new-plugin", name, "--role", role, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_name_that_an_installed_plugin_offers_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_taken: Callable[[], None]
) -> None:
    make_taken()
    assert main(["new-plugin", "occupied", "--role", "attention", "--out", str(tmp_path / "out")]) == 2
    assert "is taken: someone offers attention:occupied" in capsys.readouterr().err


@pytest.fixture
def make_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def make() -> None:
        spec = 'BackendSpec("attention", "occupied", "a.b:C", caps=(Caps(devices=("cpu",)),))'
        (tmp_path / "someone_plugin.py").write_text(
            "from minisgl_core.plugin_api import BackendSpec, Caps, PluginInfo, hookimpl\n"
            'MINISGL_PLUGIN = PluginInfo("someone", {"attention": ">=1,<2"})\n'
            f"@hookimpl\ndef minisgl_attention_backends():\n    return [{spec}]\n"
        )
        info = tmp_path / "someone-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[minisgl]\nmain = someone_plugin\n")
        monkeypatch.syspath_prepend(tmp_path)

    return make


class CapturingCpu(CpuPlatform):
    """A CPU whose platform records steps, as a GPU's does."""

    def can_capture(self) -> bool:
        return True

    def capture(self, step: Callable[[], Any], pool: Any | None) -> tuple[Any, Any, Any]:
        graph = EmulatedGraph.capture(step, pool=pool, warmup=0)
        return graph, graph.result, graph.pool


def test_the_graph_scaffold_records_where_a_platform_can(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_distribution("recorder", "graph", tmp_path, registry)
    monkeypatch.syspath_prepend(tmp_path / "src")
    spec = importlib.import_module(f"{made.package}.plugin").SPEC
    under_test = BackendUnderTest(replace(spec, caps=(Caps(devices=("cpu",), graph="decode"),)))
    fixture = DeviceFixture("cpu")
    fixture.platform = CapturingCpu()
    checks = [check for check in checks_of(under_test, fixture, quick=True) if isinstance(check, GraphCheck)]
    assert len(checks) >= 10
    with fixture.active():
        for check in checks:
            check.run(under_test, fixture)
