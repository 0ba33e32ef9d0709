"""Extracts the Python code of pages for a type checker: ``python tests/typed.py FOLDER README.md docs/index.md``."""

import re
import sys
from pathlib import Path


def python_of(page: str) -> str:
    """The Python blocks of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))


if __name__ == "__main__":
    folder, *pages = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        (folder / f"{page.stem.replace('-', '_')}.py").write_text(python_of(page.read_text(encoding="utf-8")))
