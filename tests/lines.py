"""A pytest plugin that records which lines of the library each test file runs; needs Python 3.12.

    PYTHONPATH=.:tests pytest -p lines --lines=FOLDER

It writes a JSON file into FOLDER for every test file: for each module, the numbers of the lines that ran. A line is
reported once for each test file (``sys.monitoring``), so the suite is hardly slower. Coverage with a context for each
test would take two to three times as long.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / name}/" for name in ("posjax", "train"))


class Lines:
    """Records the lines that the current test file runs."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._test: str | None = None
        self._seen: dict[str, set[int]] = defaultdict(set)
        tool, line = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "lines")
        sys.monitoring.register_callback(tool, line, self._note)
        sys.monitoring.set_events(tool, line)

    def _note(self, code, line: int):
        if code.co_filename.startswith(OURS):
            self._seen[code.co_filename].add(line)
        return sys.monitoring.DISABLE

    def _begin(self, test: str | None) -> None:
        """Writes the lines of the previous test file. Lines that ran before the first test are dropped."""
        if self._test is not None:
            lines = {Path(name).relative_to(ROOT).as_posix(): sorted(seen) for name, seen in self._seen.items()}
            file = self._folder / f"{self._test.replace('/', '__')}.json"
            file.write_text(json.dumps({"test": self._test, "lines": lines}))
        self._test = test
        self._seen.clear()
        sys.monitoring.restart_events()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        test = nodeid.split("::")[0]
        if test != self._test:
            self._begin(test)

    def pytest_sessionfinish(self) -> None:
        self._begin(None)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)


def pytest_addoption(parser):
    parser.addoption("--lines", type=Path, metavar="FOLDER", help="note there which lines each test file runs")


def pytest_configure(config):
    # The process that distributes tests hears of every test too, but runs none.
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if config.option.lines and not distributes:
        config.option.lines.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Lines(config.option.lines))
