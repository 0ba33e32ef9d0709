"""Every scheme has a panel with its family, and no panel has more lines than a reader can distinguish."""

from itertools import pairwise

from report_rows import EXTENSIONS, FAMILIES, text, zoo

from train.report.groups import MOST, Group, baseline, groups


def schemes(count, **about):
    return [row for n in range(count) for row in text(f"scheme {n}", (5.0, 6.0), **about)]


def test_few_schemes_share_one_panel_without_a_title():
    assert groups(schemes(MOST)) == [Group("", tuple(f"scheme {n}" for n in range(MOST)))]


def test_the_zoo_is_forty_schemes_in_panels_of_eight_at_most():
    rows = zoo(seeds=1)
    names = {row["label"] for row in rows}
    assert len(names) == 40
    found = groups(rows)
    assert {label for group in found for label in group.labels} == names
    for group in found:
        assert len(group.labels) == len(set(group.labels)) <= MOST
        assert group.labels[0] == group.reference == "nope"


def test_panels_are_of_one_family_in_the_order_of_families():
    family = {label: name for name, labels in FAMILIES.items() for label in labels}
    found = groups(list(reversed(zoo(seeds=1))))
    shown = [
        {family[label.partition(" + ")[0]] for label in group.labels if label != group.reference} for group in found
    ]
    assert all(len(each) == 1 for each in shown)
    order = [list(FAMILIES).index(*each) for each in shown]
    assert all(one <= other for one, other in pairwise(order))


def test_many_extensions_have_panels_of_their_own_each_with_the_trained_scheme():
    found = [group for group in groups(zoo(seeds=1)) if group.title.startswith("rope, extended")]
    assert [group.title for group in found] == ["rope, extended (1 of 2)", "rope, extended (2 of 2)"]
    assert all(group.labels[:2] == ("nope", "rope") for group in found)
    extensions = [label for group in found for label in group.labels[2:]]
    assert extensions == [f"rope + {name}" for name in EXTENSIONS["rope"]]


def test_a_scheme_and_its_few_extensions_stay_in_one_panel():
    for group in groups(zoo(seeds=1)):
        for root in ("coca-strict", "inverse-leaky", "hwfa2"):
            extended = [f"{root} + {name}" for name in EXTENSIONS[root]]
            assert (root in group.labels) == (set(extended) <= set(group.labels))


def test_rows_without_families_fill_panels_evenly():
    found = groups(schemes(16))
    assert [group.title for group in found] == [f"Schemes ({n} of 3)" for n in (1, 2, 3)]
    assert [len(group.labels) for group in found] == [6, 6, 6]


def test_the_reference_is_the_first_scheme_that_was_trained():
    rows = text("a + b", (5.0,), base="a") + text("c", (5.0,))
    assert baseline(rows) == "c"
    assert baseline(rows[:1]) == "a + b"


def test_rows_of_a_failed_seed_have_the_family_of_the_others():
    rows = zoo(seeds=1)
    failed = [{**row, "seed": 1, "family": None, "error": "no memory"} for row in rows if row["label"] == "t5"]
    assert groups(rows + failed) == groups(rows)


def test_a_trained_scheme_comes_before_its_extensions_in_any_order():
    extensions = [row for n in range(8) for row in text(f"rope + {n}", (5.0,), base="rope")]
    rows = text("alibi", (5.0,)) + extensions + text("rope", (5.0,))
    assert [group.labels for group in groups(rows)] == [
        ("alibi", "rope", *(f"rope + {n}" for n in part)) for part in (range(4), range(4, 8))
    ]
    assert [group.title for group in groups(rows)] == ["rope, extended (1 of 2)", "rope, extended (2 of 2)"]


def test_extensions_of_a_scheme_that_is_not_listed_have_panels_without_it():
    extensions = [row for n in range(8) for row in text(f"rope + {n}", (5.0,), base="rope")]
    found = groups(text("alibi", (5.0,)) + extensions)
    assert [group.title for group in found] == ["rope, extended (1 of 2)", "rope, extended (2 of 2)"]
    assert [group.labels[:2] for group in found] == [("alibi", "rope + 0"), ("alibi", "rope + 4")]
