"""`check_collective`: right functions pass, and each usual mistake is named."""

import time
import warnings

import numpy as np
import pytest

from parallelism.trace import UndeclaredComputeWarning
from vcluster.check import check_collective


def neighbours(device):
    return (device.rank + 1) % device.size, (device.rank - 1) % device.size


def exchange(device, x, dst, src):
    """Right with channels that hold nothing, too."""
    return device.sendrecv(x, dst, src)


def ring_sum(device, x):
    """Whole arrays round the ring."""
    right, left = neighbours(device)
    total, passing = x, x
    for _ in range(device.size - 1):
        passing = exchange(device, passing, right, left)
        total = total + passing
    return total


def ring_all_reduce(device, x, *, gather_from=1, gather_steps=None, adds=False, half=False, split=np.array_split):
    """Reduce-scatter, then all-gather."""
    size, rank = device.size, device.rank
    right, left = neighbours(device)
    pieces = [piece.copy() for piece in split(x, size)]
    for step in range(size - 1):
        arrived = exchange(device, pieces[(rank - step) % size], right, left)
        pieces[(rank - step - 1) % size] += arrived
    for step in range(0 if half else size - 1 if gather_steps is None else size - 1 + gather_steps):
        arrived = exchange(device, pieces[(rank - step + gather_from) % size], right, left)
        at = (rank - step + gather_from - 1) % size
        pieces[at] = pieces[at] + arrived if adds else arrived
    return np.concatenate(pieces)


def ring_gather(device, x):
    right, left = neighbours(device)
    pieces = {device.rank: x}
    passing = x
    for step in range(1, device.size):
        passing = exchange(device, passing, right, left)
        pieces[(device.rank - step) % device.size] = passing
    return np.concatenate([pieces[rank] for rank in range(device.size)])


def passes_on_what_arrived(device, x):
    """All but rank 0 receive first, and send that on."""
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size - 1):
        if device.rank == 0:
            device.send(passing, right)
        passing = device.recv(left)
        if device.rank:
            device.send(passing, right)
        total = total + passing
    return total


def exchange_blocks(device, x, *, block=lambda device, target: target, order=sorted, rounds=0):
    blocks = np.array_split(x, device.size)
    got = dict(enumerate(blocks)) | {device.rank: blocks[block(device, device.rank)]}
    for by in range(1, device.size + rounds):
        to, source = (device.rank + by) % device.size, (device.rank - by) % device.size
        got[source] = exchange(device, blocks[block(device, to)], to, source)
    return np.concatenate([got[source] for source in order(got)])


def from_root(device, x, root=0):
    if device.rank != root:
        return device.recv(root)
    for rank in range(device.size):
        if rank != root:
            device.send(x, rank)
    return x


def to_root(device, x, root=0, combine=np.add):
    if device.rank != root:
        device.send(x, root)
        return None
    total = None
    for rank in range(device.size):
        piece = x if rank == root else device.recv(rank)
        total = piece if total is None else combine(total, piece)
    return total


def scattered(device, x, root=0):
    if device.rank != root:
        return device.recv(root)
    blocks = np.array_split(x, device.size)
    for rank in range(device.size):
        if rank != root:
            device.send(blocks[rank], rank)
    return blocks[root]


def reduce_scattered(device, x, *, to=lambda rank, size: rank):
    blocks = np.array_split(exchange_sum(device, x), device.size)
    return blocks[to(device.rank, device.size)]


def exchange_sum(device, x):
    total = None
    for rank in range(device.size):
        piece = x if rank == device.rank else exchange(device, x, rank, rank)
        total = piece if total is None else total + piece
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mine"), [
    ("all_reduce", ring_sum), ("all_reduce", ring_all_reduce), ("all_gather", ring_gather),
    ("all_to_all", exchange_blocks), ("broadcast", from_root), ("reduce", to_root), ("scatter", scattered),
    ("gather", lambda device, x: to_root(device, x, combine=lambda a, b: np.concatenate([a, b]))),
    ("reduce_scatter", reduce_scattered),
    ("all_scatter", lambda device, x: [x if rank == device.rank else exchange(device, x, rank, rank)
                                       for rank in range(device.size)]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_right_function_passes(kind, mine):
    answer = check_collective(kind, mine)
    assert answer, str(answer)
    assert str(answer).startswith(f"PASSED: {kind} by ")
    assert answer.cases >= 32


@pytest.mark.usefixtures("four_ranks_alone")
def test_figures_stand_beside_the_closed_forms_of_known_algorithms():
    answer = check_collective("all_reduce", ring_all_reduce, algorithm="ring")
    assert answer.sentence.endswith("On 4 ranks, with 64 bytes, its bytes, messages and steps are those of ring")
    rows = {row[0]: row[1:] for row in answer.figures}
    assert rows["yours"] == rows["ring"] == ("96", "6", "6")          # 2 (g - 1) / g of 64 bytes, 2 (g - 1) steps
    assert rows["naive"] == ("192", "3", "1")
    other = check_collective("all_reduce", ring_sum, algorithm="ring")
    assert not other
    assert "bytes received: 192, and ring has 96" in str(other)
    assert other.likely == "whole arrays are sent where pieces of them are enough"


# ------------------------------------------------------------------------------------------------------- mistakes

def a_step_too_few(device, x):
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size - 2):
        passing = exchange(device, passing, right, left)
        total = total + passing
    return total


def a_step_too_many(device, x):
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size):
        passing = exchange(device, passing, right, left)
        total = total + passing
    return total


def forgets_own(device, x):
    right, left = neighbours(device)
    total, passing = np.zeros_like(x), x
    for _ in range(device.size - 1):
        passing = exchange(device, passing, right, left)
        total = total + passing
    return total


def running_total(device, x):
    right, left = neighbours(device)
    for _ in range(device.size - 1):
        x = x + exchange(device, x, right, left)
    return x


def adds_the_first_twice(device, x):
    right, left = neighbours(device)
    total = arrived = x
    for step in range(device.size - 1):
        arrived = exchange(device, arrived, right, left)
        total = total + (2 * arrived if step == 0 else arrived)
    return total


def sends_own_always(device, x):
    right, left = neighbours(device)
    total = x
    for _ in range(device.size - 1):
        total = total + exchange(device, x, right, left)
    return total


def adds_own_always(device, x):
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size - 1):
        passing = exchange(device, passing, right, left)
        total = total + x
    return total


def copies(device, x):
    right, left = neighbours(device)
    for _ in range(device.size - 1):
        x = exchange(device, x, right, left)
    return x


def one_neighbour(device, x):
    right, left = neighbours(device)
    return x + exchange(device, x, right, left) if device.size > 1 else x


def ignores_what_arrives(device, x):
    right, left = neighbours(device)
    for _ in range(device.size - 1):
        exchange(device, x, right, left)
    return x


def returns_nothing(device, x):
    ring_sum(device, x)


def only_rank_0(device, x):
    total = to_root(device, x)
    return x if total is None else total


def some_return_none(device, x):
    return to_root(device, x)


def not_closed(device, x):
    device.send(x, device.rank + 1)
    return x + device.recv((device.rank - 1) % device.size)


def before_rank_0(device, x):
    device.send(x, (device.rank + 1) % device.size)
    return x + device.recv(device.rank - 1)


def receives_first(device, x):
    right, left = neighbours(device)
    arrived = device.recv(left)
    device.send(x, right)
    return x + arrived


def sends_first(device, x):
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size - 1):
        device.send(passing, right)
        passing = device.recv(left)
        total = total + passing
    return total


def directions(device, x):
    right, _ = neighbours(device)
    device.send(x, right)
    return x + device.recv(right)


def one_receive_too_many(device, x):
    right, left = neighbours(device)
    total = x
    for step in range(device.size):
        if step < device.size - 1:
            device.send(x, right)
        total = total + device.recv(left)
    return total


def one_send_too_many(device, x):
    right, left = neighbours(device)
    total = passing = x
    for _ in range(device.size - 1):
        device.send(passing, right)
        passing = device.recv(left)
        total = total + passing
    device.send(passing, right)
    return total


def endless(device, x):
    step = 0
    while step < device.size:
        pass
    return x


def fixed_size(device, x):
    total = passing = x
    for _ in range(3):
        passing = exchange(device, passing, (device.rank + 1) % 4, (device.rank - 1) % 4)
        total = total + passing
    return total


def doubling(device, x):
    step = 1
    while step < device.size:
        peer = device.rank ^ step
        if peer < device.size:
            x = x + exchange(device, x, peer, peer)
        step *= 2
    return x


def piece_past_the_end(device, x):
    right, left = neighbours(device)
    pieces = np.array_split(x, device.size)
    for step in range(device.size - 1):
        pieces[device.rank] = pieces[device.rank] + exchange(device, pieces[device.rank + step], right, left)
    return np.concatenate(pieces)


def equal_pieces(device, x):
    length = len(x) // device.size
    return ring_all_reduce(device, x, split=lambda x, size: [x[i * length:(i + 1) * length] for i in range(size)])


def writes_into_x(device, x):
    passing = x.copy()
    right, left = neighbours(device)
    for _ in range(device.size - 1):
        passing = exchange(device, passing, right, left)
        x += passing
    return x


def floats(device, x):
    total = np.zeros(x.shape)
    return total + ring_sum(device, x)


def to_float32(device, x):
    return ring_sum(device, x).astype(np.float32)


def adds_in_float32(device, x):
    return ring_sum(device, x.astype(np.float32)).astype(x.dtype)


def lacks_rank_0(device, x):
    """Looks on 4 ranks like a sum in float32."""
    return ring_sum(device, x if device.rank else 0 * x)


def fails_when_empty(device, x):
    return ring_sum(device, x) * (x.max() / x.max())


def in_order_of_arrival(device, x):
    right, left = neighbours(device)
    pieces = passing = [x]
    for _ in range(device.size - 1):
        passing = [exchange(device, passing[0], right, left)]
        pieces = pieces + passing
    return np.concatenate(pieces)


def gather_sends_own(device, x):
    right, left = neighbours(device)
    pieces = {device.rank: x}
    for step in range(1, device.size):
        pieces[(device.rank - step) % device.size] = exchange(device, x, right, left)
    return np.concatenate([pieces[rank] for rank in range(device.size)])


def gather_forgets_own(device, x):
    whole = np.zeros(device.size * len(x))
    return gathered_into(device, x, whole, own=False)


def gathered_into(device, x, whole, *, own=True, steps=0, adds=False):
    right, left = neighbours(device)
    length, passing = len(x), x
    if own:
        whole[device.rank * length:][:length] = x
    for step in range(1, device.size + steps):
        passing = exchange(device, passing, right, left)
        at = (device.rank - step) % device.size
        if adds:
            whole[:length] += passing
        else:
            whole[at * length:][:length] = passing
    return whole


def extreme(combined):
    def mine(device, x):
        total = arrived = x
        for _ in range(device.size - 1):
            device.isend(arrived, (device.rank + 1) % device.size)
            arrived = device.recv((device.rank - 1) % device.size)
            total = combined(total, arrived)
        return total
    return mine


def even_zeros(device, x):
    return np.zeros(device.size * len(x))


MISTAKES = {
    "one step too few": ("all_reduce", a_step_too_few, "off by one: a step too few. Rank 0 lacks the array of rank 1"),
    "one step too many": ("all_reduce", a_step_too_many, "the own array is counted twice: one step too many"),
    "own array forgotten": ("all_reduce", forgets_own, "the own array is forgotten"),
    "passes on its total": ("all_reduce", running_total, "passes on its running total"),
    "a neighbour twice": ("all_reduce", adds_the_first_twice, "one is added twice: rank 0 has that of rank 3 twice"),
    "sends its own always": ("all_reduce", sends_own_always, "the own array is sent in every step"),
    "adds its own always": ("all_reduce", adds_own_always, "the own array is added in every step"),
    "copy for sum": ("all_reduce", copies, "a copy stands for a sum"),
    "maximum for sum": ("all_reduce", extreme(np.maximum), "which has the largest elements: a maximum, or a copy"),
    "minimum for sum": ("all_reduce", extreme(np.minimum), "which has the smallest elements: a minimum, or a copy"),
    "one step only": ("all_reduce", one_neighbour, "only its own array and that of a neighbour: there is one step"),
    "nothing is added": ("all_reduce", ignores_what_arrives, "each rank returns its own array"),
    "no return": ("all_reduce", returns_nothing, "a return is missing"),
    "reduce for all_reduce": ("all_reduce", only_rank_0, "only rank 0 has the sum"),
    "return on one rank": ("all_reduce", some_return_none, "ranks 1-3 return nothing"),
    "mean": ("all_reduce", lambda device, x: ring_sum(device, x) / device.size, "a mean stands for a sum"),
    "summed twice": ("all_reduce", lambda device, x: ring_sum(device, ring_sum(device, x)), "counted 4 times"),
    "joined": ("all_reduce", ring_gather, "the arrays are joined, in place of added up"),
    "second half missing": ("all_reduce", lambda device, x: ring_all_reduce(device, x, half=True),
                            "the whole sum of one piece only"),
    "second half adds": ("all_reduce", lambda device, x: ring_all_reduce(device, x, adds=True), "sum in place of copy"),
    "second half too short": ("all_reduce", lambda device, x: ring_all_reduce(device, x, gather_steps=-1),
                              "the second half stops too early"),
    "second half begins wrong": ("all_reduce", lambda device, x: ring_all_reduce(device, x, gather_from=0),
                                 "begins with the wrong piece (off by one)"),
    "ring not closed": ("all_reduce", not_closed, "the ring is not closed"),
    "rank -1": ("all_reduce", before_rank_0, "the ring is not closed"),
    "all receive first": ("all_reduce", receives_first, "every rank receives before it sends"),
    "all send first": ("all_reduce", sends_first, "every rank sends before it receives"),
    "directions differ": ("all_reduce", directions, "the directions of send and receive do not agree"),
    "one receive too many": ("all_reduce", one_receive_too_many, "one receive too many, or one send too few"),
    "one send too many": ("all_reduce", one_send_too_many, "one send too many, or one receive too few"),
    "endless": ("all_reduce", endless, "a loop that never ends"),
    "size in the code": ("all_reduce", fixed_size, "a number stands in the code in place of device.size"),
    "powers of two": ("all_reduce", doubling, "it needs a power of two"),
    "piece past the end": ("all_reduce", piece_past_the_end, "runs past the last one"),
    "equal pieces": ("all_reduce", equal_pieces, "lengths that do not divide by the number of ranks"),
    "writes into x": ("all_reduce", writes_into_x, "change an array in place"),
    "dtype": ("all_reduce", floats, "it is right but for integers. The dtype changes"),
    "float32": ("all_reduce", to_float32, "the dtype changes: float32 comes out where float64 went in"),
    "adds in float32": ("all_reduce", adds_in_float32, "on the way they are float32"),
    "lacks rank 0": ("all_reduce", lacks_rank_0, "the array of rank 0 is in no result"),
    "empty": ("all_reduce", fails_when_empty, "it is right but for empty arrays"),
    "the collective itself": ("all_reduce", lambda device, x: device.all_reduce(x), "write all_reduce with messages"),
    "None": ("all_reduce", lambda device, x: x + to_root(device, x), "None is used as an array"),
    "order of arrival": ("all_gather", in_order_of_arrival, "joined in the order in which they arrive"),
    "gather sends its own": ("all_gather", gather_sends_own, "the own piece is sent in every step"),
    "gather without own": ("all_gather", gather_forgets_own, "the own piece is forgotten"),
    "gather too short": ("all_gather", lambda device, x: gathered_into(device, x, even_zeros(device, x), steps=-1),
                         "are still empty: the steps end too early"),
    "sum for copy": ("all_gather", lambda device, x: gathered_into(device, x, even_zeros(device, x), adds=True),
                     "a sum stands for a copy"),
    "not joined": ("all_gather", lambda device, x: [x] * device.size, "pieces that are not joined"),
    "stacked": ("all_gather", lambda device, x: ring_gather(device, x)[None], "stacked along a new dim"),
    "reversed": ("all_gather", lambda device, x: np.concatenate(
        np.array_split(ring_gather(device, x), device.size)[::-1]), "joined in reverse order"),
    "one piece": ("all_gather", ignores_what_arrives, "the pieces of all ranks are not joined"),
    "block of the next rank": ("reduce_scatter", lambda device, x: reduce_scattered(
        device, x, to=lambda rank, size: (rank + 1) % size), "off by one: rank j has block j + 1"),
    "the same block": ("reduce_scatter", lambda device, x: reduce_scattered(
        device, x, to=lambda rank, size: 0), "all ranks have the same block"),
    "not cut": ("reduce_scatter", ring_sum, "the whole array is returned, in place of one block"),
    "block 0 for all": ("all_to_all", lambda device, x: exchange_blocks(device, x, block=lambda device, target: 0),
                        "sends its block 0 to all ranks"),
    "own block for all": ("all_to_all", lambda device, x: exchange_blocks(
        device, x, block=lambda device, target: device.rank), "the block must depend on the rank"),
    "root ignored": ("broadcast", lambda device, x, root=0: from_root(device, x), "right but for a root other than 0"),
    "broadcast to one": ("broadcast", lambda device, x: (exchange(device, x, *neighbours(device)) if device.rank == 1
                                                         else (exchange(device, x, *neighbours(device)), x)[1]),
                         "that of the root never reaches them"),
    "places mirrored": ("all_gather", lambda device, x: gathered(device, x, place=lambda rank, step: rank + step),
                        "the pieces are put on the wrong side of the own one"),
    "own place": ("all_gather", lambda device, x: gathered(device, x, place=lambda rank, step: rank - step + 1),
                  "the own piece is overwritten"),
    "one place": ("all_gather", lambda device, x: gathered(device, x, place=lambda rank, step: rank - 1),
                  "what arrives overwrites what arrived before"),
    "gather a step too few": ("all_gather", lambda device, x: gathered(device, x, steps=-1),
                              "off by one: a step too few. Rank 0 receives 2 of 3 messages"),
    "the array of rank 0 alone": ("all_reduce", passes_on_what_arrived, "only the array of rank 0 travels"),
    "a round too few": ("all_to_all", lambda device, x: exchange_blocks(device, x, rounds=-1),
                        "on rank 0 an own block still stands at the place of rank 1"),
    "scatter of one block": ("scatter", lambda device, x: from_root(
        device, None if x is None else np.array_split(x, device.size)[0]), "all ranks get the same block"),
}


RING_MISTAKES = {
    "one step too many": ("all_gather", lambda device, x: gathered(device, x, steps=1), "one step too many"),
    "wrong direction": ("all_gather", lambda device, x: gathered(
        device, x, place=lambda rank, step: rank + step, way=-1), "the wrong direction: messages go round the ring"),
    "wrong direction, wrong places": ("all_gather", lambda device, x: gathered(device, x, way=-1),
                                      "the wrong direction: messages go round the ring"),
    "direct": ("all_gather", lambda device, x: np.concatenate(
        [x if rank == device.rank else exchange(device, x, rank, rank) for rank in range(device.size)]),
        "arrays are sent directly to the ranks that need them"),
    "the own piece is sent": ("all_reduce", lambda device, x: in_halves(device, x, send=lambda rank, step: rank),
                              "in step 1 of the first half, counted from 0, rank 0 sends piece 0. In the step before, "
                              "piece 3 has arrived"),
    "added to what was sent": ("all_reduce", lambda device, x: in_halves(device, x, add=lambda rank, step: rank - step),
                               "piece 3 arrives on rank 0, and is not added to piece 3"),
    "copied in the first half": ("all_reduce", lambda device, x: in_halves(device, x, adds=False),
                                 "in step 0 of the first half a copy stands for a sum"),
    "first half too short": ("all_reduce", lambda device, x: in_halves(device, x, first=-1),
                             "or the first half ends a step too early"),
    "first half too long": ("all_reduce", lambda device, x: in_halves(device, x, first=1),
                            "one step too many: on one rank there is nothing to send"),
    "only a part of the first half": ("all_reduce", lambda device, x: in_halves(device, x, first=-1, halves=1),
                                      "the first half ends too early: it has 2 of 3 steps"),
    "second half begins wrong": ("all_reduce", lambda device, x: in_halves(
        device, x, begin=0), "begins with the wrong piece: in step 0 of the second half rank 0 sends piece 0, which is "
        "not complete: its first element is x0[0]"),
    "second half too short": ("all_reduce", lambda device, x: in_halves(device, x, second=-1),
                              "the second half stops too early: it has 2 of 3 steps"),
    "second half too long": ("all_reduce", lambda device, x: in_halves(device, x, second=1), "one step too many"),
    "whole arrays": ("all_reduce", lambda device, x: x + exchange(device, x, *neighbours(device)),
                     "sends a whole array, where a piece is meant"),
    "second half adds": ("all_reduce", lambda device, x: ring_all_reduce(device, x, adds=True), "sum in place of copy"),
    "second half missing": ("all_reduce", lambda device, x: in_halves(device, x, halves=1),
                            "the second half, which brings the pieces to all ranks, is missing"),
}


def gathered(device, x, *, place=lambda rank, step: rank - step, steps=0, way=1):
    """An all-gather round the ring, that arrives at a place of its own."""
    rank, size = device.rank, device.size
    pieces, passing = [None] * size, x
    pieces[rank] = x
    for step in range(1, size + steps):
        passing = exchange(device, passing, (rank + way) % size, (rank - way) % size)
        pieces[place(rank, step) % size] = passing
    return np.concatenate([piece for piece in pieces if piece is not None])


def in_halves(
    device, x, *, send=lambda rank, step: rank - step, add=lambda rank, step: rank - step - 1, adds=True, first=0,
    begin=1, second=0, halves=2,
):
    """A ring all-reduce by pieces."""
    rank, size = device.rank, device.size
    pieces = [piece.copy() for piece in np.array_split(x, size)]
    for step in range(size - 1 + first):
        arrived = exchange(device, pieces[send(rank, step) % size], *neighbours(device))
        at = add(rank, step) % size
        pieces[at] = pieces[at] + arrived if adds else arrived
    for step in range(size - 1 + second if halves == 2 else 0):
        arrived = exchange(device, pieces[(rank + begin - step) % size], *neighbours(device))
        pieces[(rank + begin - step - 1) % size] = arrived
    return np.concatenate(pieces)


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("name", RING_MISTAKES)
def test_a_mistake_on_the_ring_is_named(name, monkeypatch):
    monkeypatch.setattr("vcluster.check.collective._SIZES", (4, 1))     # of these two the sentences tell
    kind, mine, words = RING_MISTAKES[name]
    answer = check_collective(kind, mine, algorithm="ring", hop=1, sends_wait=False)
    assert not answer
    assert words.lower() in answer.likely.lower(), str(answer)


@pytest.mark.slow
@pytest.mark.usefixtures("four_ranks_alone")
def test_any_way_round_the_ring_will_do_where_no_hop_is_asked_for():
    def other_way(device, x):
        return gathered(device, x, place=lambda rank, step: rank + step, way=-1)

    assert check_collective("all_gather", other_way, algorithm="ring")
    assert check_collective("all_gather", other_way, algorithm="ring", hop=-1)
    refused = check_collective("all_gather", other_way, hop=1)
    assert refused.sentence == ("the result is right, but on 4 ranks rank 0 sends to rank 3, and its messages should "
                                "all go to rank 1")
    assert check_collective("all_gather", gathered, algorithm="ring", hop=1)
    assert check_collective("all_reduce", in_halves, algorithm="ring", hop=1)


@pytest.mark.sampled(60, 26)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_usual_mistake_is_named(name, monkeypatch):
    if name == "endless":
        monkeypatch.setattr("vcluster.check.observed_run.DEADLINE_SECONDS", 0.15)
    kind, mine, words = MISTAKES[name]
    answer = check_collective(kind, mine)
    assert not answer
    assert answer.sentence
    assert words.lower() in answer.likely.lower(), str(answer)


def test_at_least_25_mistakes_have_a_sentence_of_their_own():
    assert len({words for _, _, words in MISTAKES.values()}) >= 40


def test_the_answer_says_which_rank_and_element_and_what_it_should_hold(monkeypatch):
    monkeypatch.setattr("vcluster.check.collective._SIZES", (4, 2))
    answer = check_collective("all_reduce", forgets_own)
    assert "Likely mistake: the own array is forgotten" in str(answer)
    assert answer.sentence == "on 4 ranks with shape (8,): ranks 0-3 of 4 return a wrong result"
    assert answer.details[1] == ("rank 1, piece 0, element [0]: should hold x0[0] + x1[0] + x2[0] + x3[0], holds "
                                 "x0[0] + x2[0] + x3[0]")
    assert "the own array is forgotten" in answer._repr_html_()


def test_a_wrong_call_of_the_check_is_an_error():
    with pytest.raises(ValueError, match="no collective 'all_sum'"):
        check_collective("all_sum", ring_sum)
    with pytest.raises(TypeError, match="mine must be a function"):
        check_collective("all_reduce", 3)
    with pytest.raises(ValueError, match="ring"):
        check_collective("all_reduce", ring_sum, algorithm="rings")


@pytest.mark.usefixtures("four_ranks_alone")
def test_cpu_seconds_beside_the_function_do_not_warn(monkeypatch):
    shares = np.may_share_memory

    def slow(*arrays):
        start = time.thread_time()
        while time.thread_time() - start < 0.006:      # three times what is tolerated
            pass
        return shares(*arrays)

    monkeypatch.setattr(np, "may_share_memory", slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndeclaredComputeWarning)
        assert check_collective("all_reduce", ring_all_reduce, algorithm="ring").passed
