"""What people look at: a recorded or predicted `parallelism.trace.Trace`, drawn."""

from parallelism.trace.chrome import holistic
from vcluster.report.beside import beside
from vcluster.report.comparison import Change, Comparison, compare
from vcluster.report.page import html
from vcluster.report.terminal import coloured_timeline, timeline

__all__ = ["Change", "Comparison", "beside", "coloured_timeline", "compare", "holistic", "html", "timeline"]
