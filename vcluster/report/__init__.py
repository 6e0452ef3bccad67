"""What people look at: a recorded or predicted `parallelism.trace.Trace`, drawn."""

from vcluster.report.terminal import coloured_timeline, timeline

__all__ = ["coloured_timeline", "timeline"]
