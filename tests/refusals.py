"""Checks that bad input is refused; each room has one table of such calls."""

import re
from collections.abc import Callable

import pytest


def refused(name: str, call: Callable[[], object], kind: type[Exception] = ValueError) -> None:
    """Checks that a call raises an error of this kind, in one line, that names the argument."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message), message
