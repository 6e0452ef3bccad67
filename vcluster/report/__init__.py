"""What people look at: a recorded or predicted `parallelism.trace.Trace`, drawn."""

from vcluster.report.comparison import Comparison, compare
from vcluster.report.page import html
from vcluster.report.terminal import coloured_timeline, timeline

__all__ = ["Comparison", "coloured_timeline", "compare", "html", "timeline"]
