"""A hang of a job explained from what each of its ranks has recorded: who waits for whom, and which decision differed."""

from vcluster.hangs.explanation import Explanation, explain
from vcluster.hangs.files import DumpError

__all__ = ["DumpError", "Explanation", "explain"]
