"""The pages of a cache: which are free, and which each request has."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Pages:
    """So many pages; a request takes some, the lowest that are free, and gives them back.

    >>> pages = Pages(4)
    >>> pages.take(1, 3), pages.free
    ((0, 1, 2), 1)
    >>> pages.give_back(1)
    >>> pages.free
    4
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        heapify(self._free)
        self._of: dict[int, tuple[int, ...]] = {}

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def take(self, request: int, count: int) -> tuple[int, ...]:
        """Pages for a request, which has none yet.  ``ValueError`` if fewer are free."""
        if request in self._of:
            raise ValueError(f"request {request} has pages already")
        if count > len(self._free):
            raise ValueError(
                f"request {request} needs {count} pages, and {len(self._free)} of {self.count} are free"
            )
        self._of[request] = tuple(heappop(self._free) for _ in range(count))
        return self._of[request]

    def of(self, request: int) -> tuple[int, ...]:
        """The pages of a request, in the order of its tokens."""
        return self._of[request]

    def give_back(self, request: int) -> None:
        """Frees the pages of a request."""
        for page in self._of.pop(request):
            heappush(self._free, page)
