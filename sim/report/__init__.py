"""report.html: one file that opens offline and shows what a run did. It imports plotly: import it late."""

from sim.report.page import write_report

__all__ = ["write_report"]
