"""What Python calls while a test looks, and nothing else."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def profiled(note: Callable[..., Any]) -> Iterator[None]:
    """``note`` is told of every call.  No garbage is collected meanwhile: hypothesis is called whenever some is."""
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()
