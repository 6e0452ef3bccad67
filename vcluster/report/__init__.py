"""Reports of a recorded or simulated `parallelism.trace.Trace`: as text, as a page, compared with another trace."""

from parallelism.trace.chakra import chakra
from parallelism.trace.chrome import holistic
from vcluster.report.comparison import Change, Comparison, compare, comparison_html
from vcluster.report.page import html, show
from vcluster.report.plan_page import plan_html
from vcluster.report.terminal import coloured_timeline, timeline
from vcluster.report.two_traces import beside

__all__ = [
    "Change",
    "Comparison",
    "beside",
    "chakra",
    "coloured_timeline",
    "compare",
    "comparison_html",
    "holistic",
    "html",
    "plan_html",
    "show",
    "timeline",
]
