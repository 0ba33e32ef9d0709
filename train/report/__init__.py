"""Reports of an evaluation: figures, tables for the terminal, and one HTML page with everything."""

from train.report.numbers import Estimate, Row, estimate
from train.report.page import FILES, About, pictures, render, show, write
from train.report.tables import Table, chosen_rates, tables, updates_to_loss

__all__ = [
    "FILES",
    "About",
    "Estimate",
    "Row",
    "Table",
    "chosen_rates",
    "estimate",
    "pictures",
    "render",
    "show",
    "tables",
    "updates_to_loss",
    "write",
]
