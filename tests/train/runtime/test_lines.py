"""Errors as single lines."""

import pytest

from train.runtime.lines import Listed, in_a_line, in_lines


@pytest.mark.parametrize(
    ("error", "longest", "line"),
    [
        (ValueError("two\n  lines\t and more"), None, "two lines and more"),
        (ValueError("two\n  lines"), 5, "two l"),
        (EOFError(), None, "EOFError"),
        (ValueError(" \n"), 5, "ValueError"),
    ],
)
def test_an_error_is_a_line(error, longest, line):
    assert in_a_line(error, longest) == line


def test_alternatives_are_listed_one_a_line():
    assert in_lines(Listed("name one:", ["a", "b"])) == "name one:\n  a\n  b"
    assert in_lines(ValueError("two\n  lines")) == "two lines"
