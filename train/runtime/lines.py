"""Errors, told in a line, or in one for each thing that would work."""

from collections.abc import Sequence


class Listed(ValueError):
    """A mistake that is told with what would work, a line each."""

    def __init__(self, message: str, choices: Sequence[str]):
        super().__init__("\n  ".join([message, *choices]))


def in_lines(error: BaseException) -> str:
    """What an error says: in one line, but for a `Listed`."""
    return str(error) if isinstance(error, Listed) else in_a_line(error)


def in_a_line(error: BaseException, longest: int | None = None) -> str:
    """What an error says, in one line and at most so many letters; its kind where it says nothing."""
    return " ".join(str(error).split())[:longest] or type(error).__name__
