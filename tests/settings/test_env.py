from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_core.env import ENV, EnvVar
from minisgl_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False), ("", False), (" ", False)],
)
def test_flags_read_the_usual_words(monkeypatch: pytest.MonkeyPatch, text: str, value: Any) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", text)
    assert ENV.DISABLE_OVERLAP_SCHEDULING.value is value


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("MINISGL_CHECK_INTEGRITY", "maybe", "use 1 or 0"),
        ("MINISGL_PROBE_TIMEOUT_S", "soon", "use a number of seconds"),
        ("MINISGL_PROBE_TIMEOUT_S", "-1", "use a number of seconds"),
        ("MINISGL_PROBE_TIMEOUT_S", "nan", "use a number of seconds"),
    ],
)
def test_text_that_cannot_be_read_is_an_error_naming_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, wanted: str
) -> None:
    monkeypatch.setenv(name, text)
    variable = next(item for item in ENV.all() if item.name == name)
    with pytest.raises(ConfigError, match=f"{name} is '{text}'; {wanted}, or unset it") as refused:
        _ = variable.value
    assert refused.value.field == name


def test_a_value_set_in_the_program_wins_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CHECK_INTEGRITY", "0")
    try:
        ENV.CHECK_INTEGRITY.value = True
        assert ENV.CHECK_INTEGRITY.value is True
    finally:
        ENV.CHECK_INTEGRITY.reset()
    assert ENV.CHECK_INTEGRITY.value is False


def test_a_variable_set_after_import_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CACHE_DIR", raising=False)
    before = ENV.CACHE_DIR.value
    monkeypatch.setenv("MINISGL_CACHE_DIR", "~/elsewhere")
    assert ENV.CACHE_DIR.value == Path.home() / "elsewhere" != before


def test_a_relative_xdg_folder_is_ignored_as_its_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    assert ENV.CACHE_DIR.value == Path.home() / ".cache" / "minisgl"


def test_a_home_folder_that_no_user_has_is_an_error_naming_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", "~no-user-of-this-name/cache")
    with pytest.raises(ConfigError, match="MINISGL_CACHE_DIR is '~no-user-of-this-name/cache'; use a folder"):
        _ = ENV.CACHE_DIR.value

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("MINISGL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ConfigError, match="no home folder for the cache; set MINISGL_CACHE_DIR"):
        _ = ENV.CACHE_DIR.value


def test_every_switch_is_named_after_its_variable_and_says_what_it_does() -> None:
    by_attribute = {name: item for name, item in vars(ENV).items() if isinstance(item, EnvVar)}
    assert {f"MINISGL_{name}" for name in by_attribute} == {item.name for item in ENV.all()}
    assert all(item.help for item in ENV.all())
