"""README.md: its code runs, its table is complete, and the files that its commands name exist."""

import re
from pathlib import Path

import jax.numpy as jnp

import posjax as pj

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_examples_run():
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 1024, 8, 64)
    assert jnp.isfinite(names["out"]).all()
    assert names["longer"](jnp.zeros((1, 8), jnp.int32)).shape == (1, 8, 256)


def test_every_scheme_is_in_the_table():
    rows = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    assert [name for name in pj.scheme_names() if f"`{name}`" not in rows] == []


def test_every_name_in_the_readme_exists():
    for name in set(re.findall(r"`pj\.([\w.]+)`", README)):
        value = pj
        for part in name.split("."):
            value = getattr(value, part)


def test_files_that_the_readme_names_exist():
    for path in re.findall(r"(?:configs|docs)/[\w./-]+\.\w+", README):
        assert (ROOT / path).exists(), path
