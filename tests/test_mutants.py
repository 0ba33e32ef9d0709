"""Mutation testing (`tests/mutants.py`): what mutants change, how they are drawn, and which tests kill them."""

import ast

import mutants
import pytest

MODULE = '''
def rule(x: "int | None" = 3, *, high=8) -> "int | str":
    """1 + 1."""
    if x < 0:
        raise ValueError(f"x must not be below {0 + 0}, found {x}")
    least: int = min(x, high)
    return least * -2
'''


def test_what_computes_is_changed_and_nothing_else():
    found = {(mutant.now, mutant.instead) for mutant in mutants.mutants("rule.py", MODULE)}
    assert found == {
        ("x < 0", "(x <= 0)"),
        ("0", "1"),
        ("min(x, high)", "(max(x, high))"),
        ("least * -2", "(least / -2)"),
        ("-2", "(2)"),
        ("2", "3"),
    }


def test_a_change_touches_its_expression_alone():
    for mutant in mutants.mutants("rule.py", MODULE):
        lines = zip(MODULE.splitlines(), mutant.applied(MODULE).splitlines(), strict=True)
        assert [number for number, (old, new) in enumerate(lines, start=1) if old != new] == [mutant.line]
    text = "def f(a):\n    return ('é', a +\n            1, a)\n"
    changed = mutants.mutants("f.py", text)[0].applied(text)
    assert changed == "def f(a):\n    return ('é', (a - 1), a)\n"


def test_the_draw_follows_from_its_seed_and_every_mutant_is_python():
    one, other = mutants.drawn(mutants.ROOT, 3, 50), mutants.drawn(mutants.ROOT, 4, 50)
    assert one == mutants.drawn(mutants.ROOT, 3, 50) != other
    assert len({(mutant.path, mutant.line) for mutant in one}) == 50
    for mutant in one + other:
        text = (mutants.ROOT / mutant.path).read_text(encoding="utf-8")
        changed = ast.dump(ast.parse(mutant.applied(text)))
        assert changed != ast.dump(ast.parse(text)), mutant


def test_equivalent_mutants_are_not_drawn(monkeypatch):
    monkeypatch.setitem(mutants.EQUIVALENT, ("rule.py", "return least * -2", "(2)"), "a reason")
    assert "(2)" not in [mutant.instead for mutant in mutants.mutants("rule.py", MODULE)]


def test_equivalent_mutants_are_in_the_code_as_it_is():
    for path, line, instead in mutants.EQUIVALENT:
        text = (mutants.ROOT / path).read_text(encoding="utf-8")
        assert line in [each.strip() for each in text.splitlines()], (path, line, instead)


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_test_that_notices_it(tmp_path):
    (tmp_path / "posjax").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "posjax" / "__init__.py").touch()
    (tmp_path / "posjax" / "twice.py").write_text("def twice(x):\n    return x * 2 + (x > 5) * 0\n")
    test = "from posjax.twice import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n    assert twice(3) == 6\n"
    (tmp_path / "tests" / "test_twice.py").write_text(test)
    found = mutants.mutants("posjax/twice.py", (tmp_path / "posjax" / "twice.py").read_text())
    killers = {
        mutant.instead: mutants.judged(tmp_path, mutant, ["tests/test_twice.py"])["killed_by"] for mutant in found[:2]
    }
    assert killers == {"(x * 2 - (x > 5) * 0)": None, "(x / 2)": "tests/test_twice.py::test_twice"}
