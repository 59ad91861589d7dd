from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError, UsageError
from minisgl_core.settings.load import flag_name, load_settings, variable_name
from minisgl_core.settings.schema import SECTIONS, Settings

FILE = """
[model]
path = "from-file"
[engine]
page_size = 16
seed = 1
tp_size = 2
[server]
port = 9000
[plugins]
deny = ["minisgl-fa"]
[backends]
attention = ["fa", "flashinfer"]
kv = "cuda"
ops = {sample = "flashinfer"}
[backends.options."attention:fa"]
splits = 4
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``load(text=None, environ={}, **arguments)`` with ``text`` as ./minisgl.toml."""
    monkeypatch.chdir(tmp_path)

    def run(text: str | None = None, environ: dict[str, str] | None = None, **arguments: Any) -> Settings:
        if text is not None:
            Path("minisgl.toml").write_text(text)
        return load_settings(environ=environ or {}, **arguments)

    return run


def test_defaults(load: Any) -> None:
    settings = load()
    assert (settings.model.path, settings.engine.page_size, settings.engine.tp_size) == ("", "auto", 1)
    assert (settings.allow, settings.deny, settings.backends, settings.options) == (None, (), {}, {})
    assert settings.sources == {}


def test_a_file_in_this_folder_is_read(load: Any) -> None:
    settings = load(FILE)
    assert (settings.model.path, settings.engine.page_size, settings.server.port) == ("from-file", 16, 9000)
    assert settings.deny == ("minisgl-fa",)
    assert settings.backends == {
        "attention": ["fa", "flashinfer"],
        "kv": "cuda",
        "ops": {"sample": "flashinfer"},
    }
    assert settings.options == {"attention:fa": {"splits": 4}}


def test_flag_beats_environment_beats_file_beats_default(load: Any) -> None:
    environ = {"MINISGL_SEED": "2", "MINISGL_PAGE_SIZE": "32", "MINISGL_PLUGINS_DENY": "a, b"}
    settings = load(FILE, environ, flags={"engine.page_size": "64", "engine.tp_size": None})
    engine = settings.engine
    assert (engine.page_size, engine.seed, engine.tp_size, engine.memory_ratio) == (64, 2, 2, 0.9)
    assert settings.deny == ("a", "b")
    assert {key: settings.sources[key] for key in ("engine.page_size", "engine.seed", "engine.tp_size")} == {
        "engine.page_size": "--page-size",
        "engine.seed": "MINISGL_SEED",
        "engine.tp_size": "minisgl.toml",
    }


def test_another_file_can_be_named_by_flag_or_variable(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[engine]\nseed = 7\n")
    (tmp_path / "b.toml").write_text("[engine]\nseed = 8\n")
    assert load(FILE, {"MINISGL_CONFIG": "a.toml"}).engine.seed == 7
    assert load(FILE, {"MINISGL_CONFIG": "a.toml"}, config="b.toml").engine.seed == 8


@pytest.mark.parametrize(
    ("backend_flags", "environ", "expected"),
    [
        (["attention=a"], {}, {"attention": "a"}),
        (["attention=a,b"], {}, {"attention": ["a", "b"]}),
        (["attention.prefill=a"], {}, {"attention": {"*": ["fa", "flashinfer"], "prefill": "a"}}),
        (["attention=a", "attention.decode=b"], {}, {"attention": {"*": "a", "decode": "b"}}),
        (["attention.decode=b"], {"MINISGL_BACKEND_ATTENTION": "c"}, {"attention": {"*": "c", "decode": "b"}}),
        (["attention=a"], {"MINISGL_BACKEND_ATTENTION_DECODE": "c"}, {"attention": "a"}),
        (["ops.route=x"], {}, {"ops": {"sample": "flashinfer", "route": "x"}}),
        (["linear.4096x1024=thin"], {}, {"linear": {"*": "auto", "4096x1024": "thin"}}),
        (
            [],
            {"MINISGL_BACKEND_OPS_QK_NORM_ROPE_STORE": "y"},
            {"ops": {"sample": "flashinfer", "qk_norm_rope_store": "y"}},
        ),
    ],
)
def test_backends_of_several_sources_are_merged_role_by_role(
    load: Any, backend_flags: Any, environ: Any, expected: Any
) -> None:
    backends = load(FILE, environ, backend_flags=backend_flags).backends
    assert {role: backends[role] for role in expected} == expected
    assert backends["kv"] == "cuda"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engin]\n", r"unknown table 'engin' in minisgl\.toml; did you mean 'engine'\?"),
        ("page_size = 1\n", r"key 'page_size' of minisgl\.toml is outside a table; write it below \[engine\]"),
        ("[engine]\npage_sise = 1\n", r"unknown key 'page_sise' in \[engine\] .*did you mean 'page_size'\?"),
        ("[plugins]\ndenny = []\n", r"unknown key 'denny' in \[plugins\] .*did you mean 'deny'\?"),
        ("[plugins]\ndeny = 'x'\n", r"plugins\.deny is 'x' \(from minisgl\.toml\); give a list"),
        ("engine = 3\n", r"engine in minisgl\.toml is 3; write it as a table: \[engine\] with"),
        ("plugins = 3\n", "plugins. of minisgl.toml is 3; make it a table"),
        ("backends = 3\n", "backends in minisgl.toml is 3; make it a table"),
        ("[backends]\noptions = {x = 1}\n", "write one table for each backend"),
        ("[engine]\npage_size = 0\n", r"engine\.page_size is 0 \(from minisgl\.toml\); .*greater than or equal to 1"),
        ("[engine]\ncache = 'lru'\n", r"engine\.cache is 'lru' .*'radix' or 'naive' \(prefix cache\)"),
        ("[engine]\nmemory_ratio = 1.5\n", "less than or equal to 1"),
        ("[engine\n", "config file minisgl.toml is not TOML"),
        (
            "[engine]\npage_size = true\n",
            r"page_size is True \(from minisgl\.toml\); input should not be true or false",
        ),
        ("[engine]\nseed = false\n", r"seed is False .*input should not be true or false"),
        ("[engine]\nmemory_ratio = true\n", "memory_ratio is True .*input should not be true or false"),
        ("[server]\nport = true\n", "port is True .*input should not be true or false"),
        ("[model]\npath = ''\n", r"model\.path is '' \(from minisgl\.toml\); string should have at least 1 character"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_place(load: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_a_named_file_must_be_there(load: Any) -> None:
    with pytest.raises(UsageError, match=r"config file nowhere\.toml cannot be read: No such file"):
        load(config="nowhere.toml")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"MINISGL_PAGE_SISE": "1"},
            "variable MINISGL_PAGE_SISE; did you mean 'MINISGL_PAGE_SIZE'",
        ),
        ({"MINISGL_BACKEND_ATENTION": "x"}, "did you mean 'MINISGL_BACKEND_ATTENTION'"),
        ({"MINISGL_CHECK_INTEGRTY": "1"}, "did you mean 'MINISGL_CHECK_INTEGRITY'"),
        ({"MINISGL_ZZZZZZZZZZZZZZZZ": "1"}, "MINISGL_ZZZZZZZZZZZZZZZZ; unset it"),
        ({"MINISGL_FOO": "1"}, "unknown environment variable MINISGL_FOO; unset it"),
        ({"MINISGL_OVERLAP": "0"}, "MINISGL_OVERLAP; did you mean 'MINISGL_DISABLE_OVERLAP_SCHEDULING'?"),
        ({"MINISGL_SEED": "x"}, r"engine\.seed is 'x' \(from MINISGL_SEED\); input should be a valid integer"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(load: Any, environ: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environ=environ)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["attention"], "is not ROLE=NAME"),
        (["=fa"], "is not ROLE=NAME"),
        (["attention="], "is not ROLE=NAME"),
        (["kv=a", "kv=b"], "given twice; write an ordered list: kv=a,b"),
    ],
)
def test_a_wrong_backend_flag_is_refused(load: Any, flags: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(backend_flags=flags)


def test_true_is_accepted_by_switches_alone(load: Any) -> None:
    fields = {(name, key): field for name, model in SECTIONS.items() for key, field in model.model_fields.items()}
    switches = {place for place, field in fields.items() if field.annotation is bool}
    assert switches == {("engine", "calibrated"), ("engine", "dummy_weights"), ("server", "page")}
    for section, key in fields:
        text = f"[{section}]\n{key} = true\n"
        if (section, key) in switches:
            assert getattr(getattr(load(text), section), key) is True
        else:
            with pytest.raises(ConfigError, match=f"{key} is True"):
                load(text)


def test_every_known_variable_is_accepted_and_no_two_settings_share_a_name(load: Any) -> None:
    names = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]
    for naming in (variable_name, flag_name):
        assert len({naming(*name) for name in names}) == len(names)
    assert not {variable_name(*name) for name in names} & {item.name for item in ENV.all()}
    assert all(SECTIONS[section].model_fields[key].description for section, key in names)
    load(environ={item.name: "" for item in ENV.all()} | {variable_name(*name): "" for name in names})
