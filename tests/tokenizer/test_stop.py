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


PIECES = st.tuples(st.text("ab", max_size=3), st.booleans())


@given(st.lists(PIECES, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_case_107_special_tokens_are_matched_and_never_sent(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    """Each piece is special or not: what is sent is the text before the first match, without special pieces."""
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push_special(text) if special else matcher.push(text) for text, special in pieces)
    sent += matcher.flush()
    whole, shown = "", []
    for text, special in pieces:
        whole += text
        shown += [not special] * len(text)
        if any(stop in whole for stop in stops):
            break
    end = min((place for stop in stops if (place := whole.find(stop)) >= 0), default=len(whole))
    assert sent == "".join(char for char, show in zip(whole[:end], shown, strict=False) if show)
    assert matcher.stopped == any(stop in whole for stop in stops)


def test_case_107_a_stop_string_around_a_special_token() -> None:
    matcher = StopMatcher("b<e>c")
    assert [matcher.push("ab"), matcher.push_special("<e>"), matcher.push("x")] == ["a", "", "bx"]
    assert [matcher.push("ab"), matcher.push_special("<e>"), matcher.push("cd")] == ["a", "", ""]
    assert matcher.matched == "b<e>c"


def test_case_107_part_of_a_special_token() -> None:
    matcher = StopMatcher("e>")
    assert [matcher.push("a"), matcher.push_special("<e>")] == ["a", ""]
    assert matcher.stopped
