"""The page of plans: what published numbers count, predictions beside them, and runs that are not planned."""

import dataclasses

import pytest

from train.lab.plans import table
from train.lab.plans.published import PUBLISHED
from train.plan.plan import check_split
from train.plan.pods import pod_of


@pytest.mark.lab
def test_every_entry_of_the_table_can_be_split_over_its_pod():
    everything = list(table.entries())
    assert len({entry.key for entry in everything}) == len(everything) == len(PUBLISHED) + 36
    for entry in everything:
        check_split(entry.config, entry.pod)


def test_the_page_is_that_of_the_results_and_every_entry_of_ours_is_planned():
    results = table.read()
    assert table.PAGE.read_text(encoding="utf-8") == table.page(results)
    assert [entry.key for entry in table.entries() if not entry.run and table.result(results, entry) is None] == []


def count_error(run):
    """The relative error of the FLOPs in a logged step against those that its published number counts."""
    return 1e12 * run.teraflops * pod_of(run.topology, run.slices).chips * run.seconds / run.counted - 1


@pytest.mark.lab
def test_logged_steps_take_what_their_numbers_count_and_another_count_would_not_fit():
    errors = {run.name: count_error(run) for run in PUBLISHED if run.seconds}
    assert len(errors) >= 9
    assert {name: error for name, error in errors.items() if abs(error) > 0.007} == {}
    logged = [run for run in PUBLISHED if run.seconds and run.name.startswith("Llama-3.1")]
    other = [dataclasses.replace(run, pairs={"half": "all", "all": "half"}[run.pairs]) for run in logged]
    assert min(abs(count_error(run)) for run in other) > 0.03
