"""Errors, told in a line."""


def in_a_line(error: BaseException, longest: int | None = None) -> str:
    """What an error says, in one line and at most so many letters; its kind where it says nothing."""
    return " ".join(str(error).split())[:longest] or type(error).__name__
