"""One training of a comparison, in a process of its own: ``python -m train.compare.member < CONFIG``.

The config's ``compare`` section holds the schemes to measure with the trained parameters.
"""

import sys

from train.checkpoint import RESULTS
from train.config import Config, dump, parse_text
from train.evaluate.saved import measure_entries, write_rows
from train.loop.fit import fit
from train.runtime.lines import in_a_line
from train.runtime.paths import write_file

MEMBER = "member.yaml"  # the config that the results belong to
ERROR = "error: "  # begins the line on standard error that says what went wrong


def run(config: Config) -> None:
    """Trains the config, measures every scheme of ``config.compare``, and writes the rows and their config.

    Raises ValueError when the training was interrupted; what it did is saved, and running it again resumes.
    """
    fitted = fit(config, progress=config.scheme.label)
    if not fitted.finished:
        raise ValueError(f"interrupted after {fitted.steps} of {config.steps} steps; run again to resume")
    rows = measure_entries(config.directory, config, config.compare.schemes, told=lambda line: print(line, flush=True))
    write_rows(config.directory / RESULTS, rows)
    write_file(config.directory / MEMBER, dump(config))


def main() -> int:
    """Reads a config from standard input and runs it; a bad input is one line on standard error and status 1."""
    try:
        run(parse_text(sys.stdin.read(), "standard input"))
    except (ValueError, OSError) as error:
        print(ERROR + in_a_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
