"""Errors, told in a line."""

import pytest

from train.runtime.lines import in_a_line


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
