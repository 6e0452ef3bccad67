"""One lesson in a notebook: its checks, its score, and its reset.

    from lesson import Lesson
    lesson = Lesson(2)
    lesson.check("all_gather", check_collective("all_gather", mine))
    lesson.score()
    lesson.reset()
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import make
import psutil

from vcluster.check import Answer

HERE = Path(__file__).parent
SMALL_BYTES = 9 * 2**30


class Lesson:
    """The lesson of a number, 1 to 8.

    ``backend`` is ``"thread"`` on machines with 8 GiB and less, where Python cannot share memory between processes
    (native Windows, untested), and where the environment variable ``VCLUSTER_WORKSHOP`` is ``small``; otherwise
    ``"process"``.  Answers are kept in the folder ``VCLUSTER_WORKSHOP_SCORES``, by default beside the notebooks.
    """

    def __init__(self, number: int) -> None:
        self.source = make.lesson(number)
        small = os.environ.get("VCLUSTER_WORKSHOP") == "small" or psutil.virtual_memory().total < SMALL_BYTES
        self.backend = "thread" if small or not hasattr(os, "memfd_create") else "process"
        self.last: Answer | None = None
        """The answer of the last check."""

    def check(self, exercise: str, answer: Answer) -> Answer:
        """Note whether an exercise passes, and return its answer, which the notebook shows."""
        if exercise not in self.source.exercises:
            raise ValueError(f"lesson {self.source.number} has no exercise {exercise!r}; "
                             f"there are {', '.join(self.source.exercises)}")
        self.last = answer
        passed = self._passed() - {exercise} | ({exercise} if answer else set())
        self._file.write_text(json.dumps(sorted(passed)), encoding="utf-8")
        return answer

    def score(self) -> None:
        """Print which exercises of this lesson pass."""
        passed = self._passed()
        print(f"lesson {self.source.number}: {len(passed)} of {len(self.source.exercises)} exercises")
        for exercise in self.source.exercises:
            print(f"  {'done ' if exercise in passed else 'to do'}  {exercise}")

    def reset(self) -> None:
        """Write the notebook of this lesson anew and forget its score.  Your notebook is kept as ``....old.ipynb``.

        Then reload the page, or close the notebook and open it again, without saving it.
        """
        path = HERE / f"{self.source.name}.ipynb"
        if path.exists():
            path.replace(path.with_suffix(".old.ipynb"))
        path.write_text(make.notebook(self.source), encoding="utf-8")
        self._file.unlink(missing_ok=True)
        print(f"{path.name} is as it was; reload it without saving")

    @property
    def _file(self) -> Path:
        return Path(os.environ.get("VCLUSTER_WORKSHOP_SCORES", HERE)) / f".score-{self.source.number}.json"

    def _passed(self) -> set[str]:
        return set(json.loads(self._file.read_text(encoding="utf-8"))) if self._file.exists() else set()
