"""The report of a run: one HTML file that opens without a network, and figures for a README."""

from .page import write_figures, write_report

__all__ = ["write_figures", "write_report"]
