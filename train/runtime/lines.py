"""Error messages in one line, or with one more line for each choice that would work."""

from collections.abc import Sequence


class Listed(ValueError):
    """An error whose message lists what would work, one line each."""

    def __init__(self, message: str, choices: Sequence[str]):
        super().__init__("\n  ".join([message, *choices]))


def in_lines(error: BaseException) -> str:
    """The message of an error, in one line unless it is a `Listed`."""
    return str(error) if isinstance(error, Listed) else in_a_line(error)


def in_a_line(error: BaseException, longest: int | None = None) -> str:
    """The message of an error, in one line of at most `longest` letters; its type's name if it has no message."""
    of_the_system = isinstance(error, OSError) and error.strerror and error.filename and not error.filename2
    message = f"{error.filename}: {error.strerror}" if of_the_system else str(error)
    return " ".join(message.split())[:longest] or type(error).__name__
