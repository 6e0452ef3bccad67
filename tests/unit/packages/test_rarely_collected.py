"""Work whose objects last is seldom looked at by the collector of cycles, and afterwards not at once."""

import gc
from collections.abc import Iterator

import pytest

import parallelism.rarely_collected as module
from parallelism.rarely_collected import rarely_collected


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that the collector looks at."""
    monkeypatch.setattr(module, "_frozen", False)
    found = list[int]()

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    before = gc.get_threshold()
    gc.unfreeze()                                       # what the tests before this one have frozen
    gc.callbacks.append(look)
    gc.set_threshold(100, 5, 5)
    yield found
    gc.set_threshold(*before)
    gc.callbacks.remove(look)
    gc.freeze()


@pytest.mark.parametrize(("objects", "most"), [(5000, 0), (100, 20)])
def test_the_collector_looks_after_so_many_objects_and_not_at_once_afterwards(
    looks: list[int], objects: int, most: int
) -> None:
    with rarely_collected(objects):
        looks.clear()
        kept = [[number] for number in range(900)]
    assert (len(looks) > 0) == (most > 0) and len(looks) <= most
    looks.clear()
    kept.append([900])
    assert not looks and gc.get_threshold() == (100, 5, 5)
    kept += [[number] for number in range(300)]
    assert looks and not any(looks)                     # as ever, at what is new


def test_objects_that_a_program_has_frozen_stay_frozen(looks: list[int]) -> None:
    kept = [[number] for number in range(900)]
    gc.freeze()
    with rarely_collected():
        kept.append([900])
    assert gc.get_freeze_count() > 900


def test_frozen_objects_are_counted_once(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    counts = list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 1)
    for _ in range(3):
        with rarely_collected():
            pass
    assert counts == [1]
