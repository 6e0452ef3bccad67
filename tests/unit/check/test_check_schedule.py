"""`check_schedule`: right orders pass, and each usual mistake is named."""

import pytest

from parallelism import Pipeline
from vcluster.check import check_schedule


def one_f_one_b(rank, stages, microbatches, *, ahead=lambda rank, stages: stages - rank, steady_from=None, short=0):
    warm_up = min(ahead(rank, stages), microbatches)
    actions = [f"F{k}" for k in range(warm_up)]
    for k in range(microbatches - short):
        actions.append(f"B{k}")
        follows = (warm_up if steady_from is None else steady_from) + k
        if follows < microbatches:
            actions.append(f"F{follows}")
    return actions


def gpipe(rank, stages, microbatches):
    return [f"{kind}{k}" for kind in "FB" for k in range(microbatches)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mine", "like"), [
    (one_f_one_b, "1f1b"), (gpipe, None), (gpipe, "gpipe"), (Pipeline(4, 8, "zero_bubble_h1").schedule, None),
    ([["F0", "B0"]] * 2, None)])
def test_an_order_that_can_run_passes(mine, like):
    stages, microbatches = (2, 1) if isinstance(mine, list) else (4, 8)
    answer = check_schedule(mine, stages=stages, microbatches=microbatches, like=like)
    assert answer, str(answer)
    assert answer.figures[0] == ("", "cycles", "bubble", "microbatches kept, by rank")
    assert "rank 1" in str(answer)
    assert "<svg" in answer._repr_html_() or "grid" in answer._repr_html_()


def test_the_bubble_and_the_memory_stand_beside_known_schedules():
    rows = {row[0]: row[1:] for row in check_schedule(one_f_one_b).figures}
    assert rows["yours"] == rows["1f1b"] == ("22", f"{3 / 11:.1%}", "4 3 2 1")     # (P - 1) / (M + P - 1)
    assert rows["gpipe"] == ("22", f"{3 / 11:.1%}", "8 8 8 8")


def rows_of(change):
    """1F1B with the row of each rank changed."""
    return lambda rank, stages, microbatches: change(rank, one_f_one_b(rank, stages, microbatches))


MISTAKES = {
    "no return": (lambda rank, stages, microbatches: None, "a return is missing"),
    "two arguments": (lambda rank, stages: [], "called as mine(rank, stages, microbatches)"),
    "no action": (lambda rank, stages, microbatches: ["forward 0"], "an action is a kind and a microbatch"),
    "one text": (lambda rank, stages, microbatches: "F0 B0", "a list has one text for each"),
    "no limit, and a loop below 0": (lambda rank, stages, microbatches: [
        *(f"F{k}" for k in range(stages - rank)),
        *(f"{kind}{k + (stages - rank) * (kind == 'F')}" for k in range(microbatches - stages + rank) for kind in "BF"),
        *(f"B{k}" for k in range(microbatches - stages + rank, microbatches))],
        "the warm-up of stage 0 is too long for so few microbatches"),
    "an empty rank": (rows_of(lambda rank, row: row if rank else []), "the rank is left out"),
    "forwards only": (lambda rank, stages, microbatches: [f"F{k}" for k in range(microbatches)],
                      "backwards are missing"),
    "counted from 1": (lambda rank, stages, microbatches: [f"{kind}{k + 1}" for kind in "FB"
                                                           for k in range(microbatches)],
                       "microbatches are counted from 0"),
    "another stage": (lambda rank, stages, microbatches: [f"{k % stages}F{rank}" for k in range(microbatches)],
                      "the stage and the microbatch are exchanged"),
    "steady part from 0": (lambda *sizes: one_f_one_b(*sizes, steady_from=0),
                           "the part with a backward and a forward in turn begins at microbatch 0 again"),
    "warm-up without limit": (lambda rank, stages, microbatches: [f"F{k}" for k in range(stages - rank)] + one_f_one_b(
        rank, stages, microbatches)[min(stages - rank, microbatches):],
        "the warm-up of stage 0 is too long for so few microbatches"),
    "last backward": (lambda *sizes: one_f_one_b(*sizes, short=1), "off by one: the last of the backwards"),
    "no cool-down": (rows_of(lambda rank, row: row[:len(row) - 3] if rank == 0 else row),
                     "part 3 is missing, the backwards that are left"),
    "first forward": (rows_of(lambda rank, row: row[1:]), "the first of the forwards is left out"),
    "last forward": (lambda rank, stages, microbatches: [f"F{k}" for k in range(microbatches - 1)] + [
        f"B{k}" for k in range(microbatches)], "off by one: the last of the forwards"),
    "backward first": (rows_of(lambda rank, row: ["B0", *[each for each in row if each != "B0"]]),
                       "a backward comes before the forward"),
    "F and B exchanged": (rows_of(lambda rank, row: [each.translate({70: 66, 66: 70}) for each in row]),
                          "F and B are exchanged"),
    "backwards from 4": (rows_of(lambda rank, row: [
        f"B{min(int(each[1:]) + 4, 7)}" if each[0] == "B" else each for each in row]), "B0 is missing"),
    "I without W": (rows_of(lambda rank, row: [each.replace("B", "I") for each in row]), "each I needs its W"),
    "warm-up turned round": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: rank + 1),
                             "the warm-up grows with the rank"),
    "another order on a rank": (lambda rank, stages, microbatches: [
        f"{kind}{k}" for k in range(microbatches) for kind in "FB"] if rank % 2 == 0 else [
        *(f"F{k}" for k in reversed(range(microbatches))), *(f"B{k}" for k in range(microbatches))],
        "in different orders"),
}
LIKE_1F1B = {
    "warm-up of one": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: 1), "the warm-up is too short"),
    "warm-up one too short": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: max(1, stages - rank - 1)),
                              "the warm-up is too short"),
    "warm-up one too long": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: stages - rank + 1),
                             "the warm-up is too long, or behind it a forward stands before the backward"),
    "as many as stages": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: stages),
                          "the warm-up is as long on each rank (4 forwards)"),
    "a warm-up of rank forwards": (lambda *sizes: one_f_one_b(*sizes, ahead=lambda rank, stages: rank),
                                   "rank 0 begins with a backward, so its warm-up is too short"),
    "gpipe": (gpipe, "all forwards come first: this is gpipe"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MISTAKES | LIKE_1F1B)
def test_a_usual_mistake_is_named(name):
    mine, words = (MISTAKES | LIKE_1F1B)[name]
    answer = check_schedule(mine, like="1f1b" if name in LIKE_1F1B else None)
    assert not answer
    assert words in answer.likely, str(answer)


def test_the_answer_says_where():
    answer = check_schedule(LIKE_1F1B["warm-up of one"][0], like="1f1b")
    assert answer.details == ("rank 0 runs 1 forward before its first backward, 1f1b runs 4",)
    assert answer.sentence.startswith("with 4 stages and 8 microbatches, it can run and takes ")
    wrong = check_schedule(MISTAKES["backward first"][0])
    assert wrong.sentence == ("with 4 stages and 8 microbatches, rank 0, step 0: B0 is too early; F0 comes at step 1")
    assert "'forward 0' is no action" in check_schedule(MISTAKES["no action"][0]).sentence


@pytest.mark.parametrize(("rows", "stages", "sentence", "likely"), [
    ([["F0", "B0"]], 2, "there is 1 row of actions, and none has work of stage 1",
     "the row of a rank is missing, or the work of one of its stages"),
    ([["F0", "B0"], []], 2, "there are 2 rows of actions, and none has work of stage 1", "rank 1 has no actions"),
    ([["0F0", "1F0", "2F0"], ["3F0", "3B0"]], 4, "ranks have work of 3, 1 stages, and should have as many each", ""),
    ([["F0", "B0"], ["F0"]], 2, "rank 0, step 1: 0B0 needs 1B0, which is missing on rank 1", ""),
])
def test_rows_that_are_missing_or_too_short_are_no_circle(rows, stages, sentence, likely):
    answer = check_schedule(rows, stages=stages, microbatches=1)
    assert answer.sentence.endswith(f"1 microbatch, {sentence}")
    assert answer.likely == likely


def test_a_cycle_of_the_picture_is_a_cycle_of_the_text():
    """A backward is drawn as long as a forward."""
    picture = check_schedule(one_f_one_b, like="1f1b").picture
    assert "makespan 22, bubble 27.3% of it" in picture
    assert "0B0: 7 to 8" in picture


def test_a_wrong_call_of_the_check_is_an_error():
    with pytest.raises(ValueError, match="microbatches"):
        check_schedule(gpipe, microbatches=0, like="1f1b")
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        check_schedule(gpipe, stages=0)
    with pytest.raises(ValueError, match="1f2b"):
        check_schedule(gpipe, like="1f2b")
