"""`slimpipe report`: one or several runs as one HTML page that needs nothing else."""

from slimpipe.report.page import page
from slimpipe.report.runs import ReportError, Run, read_run

__all__ = ["ReportError", "Run", "page", "read_run"]
