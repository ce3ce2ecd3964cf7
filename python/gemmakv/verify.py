"""The same tokens computed in many ways, compared bit by bit."""

from gemmakv.diagnostics._verify import Check, Report, run

__all__ = ["Check", "Report", "run"]
