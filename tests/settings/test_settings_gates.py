"""Every key of a config file and every ``MINISGL_*`` variable is used, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import ROLES
from minisgl_core.settings.load import backend_variables, load_settings, setting_variables
from minisgl_core.settings.schema import SECTIONS
from minisgl_core.settings.variables import check_variables

KEYS = sorted({key for model in SECTIONS.values() for key in model.model_fields})
UNKNOWN = st.text("abcxyz", min_size=3, max_size=8).map(lambda name: f"zz_{name}")
VALUES = st.sampled_from([True, False, 0, 1, 2, 16, 8000, 0.5, 1.5, "16", "cpu", "auto", "float32", "x", ""])
TABLES = st.sampled_from([*SECTIONS, "plugins", "backends", "zz_table", "engin"])


def toml(tables: dict[str, dict[str, Any]], stray: dict[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in stray.items()]
    for table, content in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in content.items())]
    return "\n".join(lines)


def attempt(file: Path, environ: dict[str, str]) -> Any:
    try:
        return load_settings(file, environ=environ)
    except ConfigError as error:
        return error


@settings(max_examples=300, deadline=None)
@given(
    tables=st.dictionaries(TABLES, st.dictionaries(st.one_of(st.sampled_from(KEYS), UNKNOWN), VALUES, max_size=3)),
    stray=st.dictionaries(st.one_of(st.sampled_from([*KEYS, *ROLES, "deny"]), UNKNOWN), VALUES, max_size=1),
)
def test_any_key_of_a_file_is_used_or_refused_by_name(
    tables: dict[str, dict[str, Any]], stray: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stray = {key: value for key, value in stray.items() if key not in tables}
    file = tmp_path_factory.mktemp("settings") / "minisgl.toml"
    file.write_text(toml(tables, stray))
    found = attempt(file, {})
    if isinstance(found, ConfigError):
        assert found.remedy
        named = {*stray, *tables, *(key for content in tables.values() for key in content)}
        assert any(part in named for part in found.field.split(".")), found
        return
    assert not stray
    for table, content in tables.items():
        for key, value in content.items():
            used = found.backends[key] if table == "backends" else getattr(getattr(found, table), key)
            assert used == value and type(used) in (type(value), float)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from(sorted([*setting_variables(), *backend_variables(), *(item.name for item in ENV.all())])),
            UNKNOWN.map(lambda name: f"MINISGL_{name.upper()}"),
        ),
        st.sampled_from(["1", "16", "0.5", "cpu", "x", "auto", "float32"]),
        max_size=3,
    )
)
def test_any_variable_is_used_or_refused_by_name(environ: dict[str, str]) -> None:
    found = attempt(Path("/dev/null"), environ)
    if isinstance(found, ConfigError):
        assert any(name in str(found) for name in environ)
        return
    for name, (section, key) in setting_variables().items():
        if name in environ:
            assert f"{section}.{key}" in found.sources
            assert str(getattr(getattr(found, section), key)).lower() in (environ[name], "true", f"{environ[name]}.0")
    for name, role in backend_variables().items():
        if name in environ:
            whole, _, part = role.partition(".")
            named = found.backends[whole]
            assert (named[part or "*"] if isinstance(named, dict) else named) == environ[name]


@pytest.mark.parametrize("value", ['"16"', "16.0", "true", "[16]"])
def test_a_file_has_types(value: str, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(f"[engine]\npage_size = {value}\n")
    with pytest.raises(ConfigError, match=r"engine\.page_size is .* \(from .*f\.toml\)") as caught:
        load_settings(tmp_path / "f.toml", environ={})
    assert caught.value.field == "engine.page_size"
    assert load_settings("/dev/null", environ={"MINISGL_PAGE_SIZE": "16"}).engine.page_size == 16


def test_a_whole_number_may_be_written_where_a_fraction_is_meant(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("[engine]\nmemory_ratio = 1\n")
    assert load_settings(tmp_path / "f.toml", environ={}).engine.memory_ratio == 1.0


def test_other_programs_variables_are_none_of_ours() -> None:
    check_variables({"PATH": "/bin", "MINISGLX": "1", "MINISGL": "1"})
    with pytest.raises(ConfigError, match="unknown environment variable MINISGL_; unset it"):
        check_variables({"MINISGL_": "1"})
