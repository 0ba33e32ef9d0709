"""Errors, told in a line."""

import pytest

from train.runtime.lines import Listed, in_a_line, in_lines


@pytest.mark.parametrize(
    ("error", "longest", "told"),
    [
        (ValueError("two\n  lines\t and more"), None, "two lines and more"),
        (ValueError("two\n  lines"), 5, "two l"),
        (EOFError(), None, "EOFError"),
        (ValueError(" \n"), 5, "ValueError"),
    ],
)
def test_an_error_is_a_line(error, longest, told):
    assert in_a_line(error, longest) == told


def test_what_would_work_is_listed_a_line_each():
    assert in_lines(Listed("name one:", ["a", "b"])) == "name one:\n  a\n  b"
    assert in_lines(ValueError("two\n  lines")) == "two lines"
