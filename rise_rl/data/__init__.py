"""Prompts with rubrics, out of the formats that public data sets are written in."""

from __future__ import annotations

from .example import DataError, Example
from .load import iter_examples, load_examples
from .reading import data_hash
from .report import DataReport, data_report

__all__ = ["DataError", "DataReport", "Example", "data_hash", "data_report", "iter_examples", "load_examples"]
