"""docs/deploy.md and the manifests that it describes say what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl_core.cli.serve import command
from minisgl_core.modelconfig.geometries import GEOMETRIES
from minisgl_core.server import create_app
from minisgl_core.server.run import DRAIN_S
from minisgl_core.server.state import ServerOptions, ServerState

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
FLAGS = {flag for parameter in command.params for flag in parameter.opts}


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """By kind."""
    text = (ROOT / "examples" / "kubernetes" / "minisgl.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_size_of_the_kv_pool() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (\d+) KiB \| ([\d,]+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for name, kib, tokens in rows:
        model = GEOMETRIES[name.lower()]
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
        assert per_token == int(kib) * 1024
        assert (64 << 30) // per_token == int(tokens.replace(",", ""))
    assert 64 * 8192 * 160 * 1024 == 80 << 30


def test_flags_of_the_commands_exist() -> None:
    commands = re.findall(r"minisgl serve [^\n&`]*", PAGE)
    assert commands
    used = {flag for line in commands for flag in re.findall(r"--[\w-]+", line)}
    assert used <= FLAGS
    assert {"--max-running-req", "--max-waiting"} <= FLAGS


def test_the_pod_starts_a_server_that_its_probes_reach(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][:2] == ["minisgl", "serve"]
    given = dict(each.split("=", 1) for each in container["args"][2:])
    assert given.keys() <= FLAGS
    assert (
        int(given["--port"])
        == container["ports"][0]["containerPort"]
        == manifests["Service"]["spec"]["ports"][0]["port"]
    )
    paths = create_app(ServerState(ServerOptions("x"))).openapi()["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    assert pod["enableServiceLinks"] is False


def test_a_variable_of_kubernetes_would_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why ``enableServiceLinks`` is off."""
    from click.testing import CliRunner

    monkeypatch.setenv("MINISGL_PORT", "tcp://10.0.0.1:8000")
    result = CliRunner().invoke(command, [])
    assert result.exit_code != 0
    assert "MINISGL_PORT" in str(result.exception)


def test_metrics_that_are_named_exist() -> None:
    listed = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "serve.md").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(minisgl_\w+)`", PAGE))
    assert named
    assert named <= listed


def test_the_selector_finds_the_pods(manifests: dict[str, Any]) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
