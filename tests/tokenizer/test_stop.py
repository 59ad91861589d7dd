from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.tokenizer import StopMatcher


def feed(matcher: StopMatcher, parts: list[str]) -> list[str]:
    return [matcher.push(part) for part in parts]


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["DEFGHIJ"], ("never", "DEFGHIJ")])
def test_case_48_nothing_of_a_stop_string_is_sent(stop: str | list[str]) -> None:
    matcher = StopMatcher(stop)
    assert feed(matcher, ["ABC", "DEF", "G", "HI", "J", "more"]) == ["ABC", "", "", "", "", ""]
    assert matcher.stopped
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["DEFGHIJ"]])
def test_case_48_all_is_sent_if_it_turns_out_otherwise(stop: str | list[str]) -> None:
    matcher = StopMatcher(stop)
    assert feed(matcher, ["ABC", "DEF", "G", "HI", "K"]) == ["ABC", "", "", "", "DEFGHIK"]
    assert not matcher.stopped


def test_held_text_is_flushed_at_the_end() -> None:
    matcher = StopMatcher("</s>")
    assert feed(matcher, ["x<", "/s"]) == ["x", ""]
    assert matcher.flush() == "</s"
    assert matcher.flush() == ""


def test_a_beginning_inside_a_beginning() -> None:
    matcher = StopMatcher("aab")
    assert feed(matcher, ["a", "a", "a", "b"]) == ["", "", "a", ""]
    assert matcher.stopped


def test_the_earliest_match_wins() -> None:
    matcher = StopMatcher(["late", "y"])
    assert matcher.push("xylate") == "x"
    assert matcher.stopped


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert not matcher.stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_how_text_is_cut_does_not_matter_for_one_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    """With a single stop string the result is the text before its first occurrence, however the text arrives."""
    stop = stops[0]
    parts, rest = [], text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:length])
        rest = rest[length:]
    matcher = StopMatcher(stop)
    sent = "".join(feed(matcher, parts)) + matcher.flush()
    assert sent == text.partition(stop)[0]
    assert matcher.stopped == (stop in text)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_sent_ever_contains_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(feed(matcher, list(text))) + matcher.flush()
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)
    assert matcher.stopped == any(stop in text for stop in stops)
