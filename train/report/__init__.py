"""Reports of an evaluation: figures, tables for the terminal, and one HTML page with everything."""

from train.report.numbers import Row
from train.report.page import FILES, About, render, show, write
from train.report.tables import chosen_rates, tables, updates_to_loss

__all__ = ["FILES", "About", "Row", "chosen_rates", "render", "show", "tables", "updates_to_loss", "write"]
