from __future__ import annotations

from case_table import CASES, find_tests, listed_tests


def test_every_case_has_a_test_and_the_table_names_it() -> None:
    found, listed = find_tests(), listed_tests()
    assert not [number for number in CASES if not found.get(number)]
    assert not [number for number in CASES if not listed.get(number)]


def test_every_test_in_the_table_exists() -> None:
    found, listed = find_tests(), listed_tests()
    gone = {number: set(tests) - set(found.get(number, [])) for number, tests in listed.items()}
    assert not {number: names for number, names in gone.items() if names}
