"""The report of a run and the comparison of several, HTML files that open without a network; figures for a README."""

from .compare import write_comparison
from .page import write_figures, write_report

__all__ = ["write_comparison", "write_figures", "write_report"]
