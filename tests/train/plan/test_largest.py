"""The largest arrays of a program, read from reports of the compiler."""

import os

import pytest

from train.plan.compiling import _largest_text
from train.plan.largest import Allocation, ask_for_report, largest, read

# Lines of a report of libtpu 0.0.42.1, two more lines for small arrays, and the report's part about fast memory. The
# number before a multiplication sign counts equal shapes.
REPORT = """Memory Space: default (color=0)
Total bytes: 303001075712 (282.19GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00GiB( 20%);   64.00GiB;      5603328;               12; f32[32,8192,2048], 4\u00d7(), bf16[16,32,8192,8192]
   95.31GiB( 49%);   31.31GiB; 171066097664;                5; 5\u00d7f32[32,8192,32064]
  321.62GiB( 99%);  256.00MiB; 299445354496;               16; f32[32,16,1,8192], 8\u00d7bf16[32,4,8192,64]
  321.63GiB( 99%);   12.50KiB; 299445354496;                1; pred[12800]
  321.63GiB( 99%);        20B; 299445354496;                1; ()
  The rest 1126 values are less than 5% of the total size and not shown.

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00MiB(100%);   64.00MiB;            0;                2; 2\u00d7f32[16,128,8192]
"""
ALLOCATIONS = [
    Allocation(64 * 2.0**30, "bf16[16,32,8192,8192]"),
    Allocation(31.31 * 2**30, "f32[32,8192,32064]"),
    Allocation(256 * 2.0**20, "bf16[32,4,8192,64]"),
    Allocation(12.5 * 2**10, "pred[12800]"),
]


def test_a_report_gives_the_largest_array_of_each_allocation_in_hbm():
    assert read(REPORT) == ALLOCATIONS
    assert read("Memory Space: default (color=0)\nin a form that nobody knows\n") == []


def test_the_largest_report_of_a_folder_counts(tmp_path):
    assert largest(tmp_path) == []
    (tmp_path / "module_0001.jit_f.after_optimizations-memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "module_0002.jit_g.after_optimizations-memory-usage-report.txt").write_text("Total bytes: 0\n")
    assert largest(tmp_path, 2) == ALLOCATIONS[:2]


def test_a_refusal_names_the_largest_arrays():
    assert _largest_text(ALLOCATIONS[:2]) == (
        "; the largest arrays of the program, in GiB: bf16[16,32,8192,8192] 64.0, f32[32,8192,32064] 31.3"
    )
    assert _largest_text([]) == ""


@pytest.mark.parametrize(("own", "then"), [("", ""), ("--xla_dump_to=/mine", " --xla_dump_to=/mine")])
def test_flags_of_the_user_come_last_and_win(own, then, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", own)
    ask_for_report("/ours")
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=/ours --xla_dump_hlo_as_text{then}"
