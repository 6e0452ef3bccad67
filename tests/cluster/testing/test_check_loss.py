"""`check_loss`: right training steps pass on every split, and usual mistakes are named."""

import re

import numpy as np
import pytest
from loss_steps import TIED, UNTIED, Step, reference

from vcluster import DeviceFailedError
from vcluster.testing import check_loss

MESHES = [{"dp": 1}, {"dp": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2, "tp": 3}, {"dp": 2, "cp": 2}, {"dp": 2, "pp": 2},
          {"cp": 3, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "cp": 2, "pp": 2}]
DATA = [{"dp": 2}, {"dp": 3, "tp": 2}]
MISTAKES = {
    "means of dp": ("loss", DATA, "a mean of means: the means of the ranks of dp count alike"),
    "means of microbatches": ("loss", DATA, "a mean of means: the means of the microbatches count alike"),
    "means of all": ("loss", DATA, "the means of the ranks of dp and the microbatches count alike"),
    "means of cp": ("loss", [{"cp": 2}, {"cp": 3, "dp": 2}], "the means of the ranks of cp count alike"),
    "not over dp": ("loss", DATA, "it is of the rank's own tokens: it is not summed over dp"),
    "world": ("loss", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}],
              "a sum of the means of dp is divided by the number of all ranks"),
    "sum": ("loss", DATA, "it is a sum over tokens: it is not divided by their number"),
    "padding": ("loss", DATA, "padding counts as tokens: the sum is divided by the number of all of them"),
    "padding of the last rank": ("loss", DATA, "the padding of the last rank of dp counts as tokens"),
    "no mask": ("loss", DATA, "the mask is not applied to the sum: padding has a loss, too"),
    "no mask on the last rank": ("loss", DATA, "the mask is not applied to the sum of the last rank of dp"),
    "last microbatch": ("loss", DATA, "only the last microbatch counts"),
    "times microbatches": ("loss", DATA, "it is multiplied by the number of microbatches"),
    "over microbatches": ("loss", DATA, "it is divided by the number of microbatches once too often"),
    "over tp": ("loss", [{"dp": 2, "tp": 2}, {"tp": 3}], "it is summed over tp, where each rank has all of it"),
    "times dp": ("loss", DATA, "it is summed over dp, where each rank has all of it"),
    "over dp": ("loss", DATA, "it is divided by the size of dp once too often"),
    "tied apart": ("gradient of 'embedding'", [{"pp": 2}, {"pp": 2, "tp": 2, "dp": 2}],
                   "the gradients of the tied weight are not summed over its two stages"),
    "norm of the tied weight twice": ("norm", [{"pp": 2}, {"pp": 2, "tp": 3}],
                                      "weights that every rank of pp holds count once for each of them"),
    "norm counts replicated": ("norm", [{"tp": 2}, {"dp": 2, "tp": 3}],
                               "weights that every rank of tp holds count once for each of them"),
    "norm of all ranks": ("norm", [{"dp": 2, "tp": 2}],
                          "weights that every rank of tp and dp holds count once for each of them"),
    "norm of own pieces": ("norm", [{"tp": 2}, {"dp": 2, "tp": 3}], "it is of the rank's own pieces"),
    "sum of norms": ("norm", [{"tp": 2}, {"tp": 3}], "it is a sum of norms of ranks"),
    "no root": ("norm", DATA, "it is the sum of squares: the root is missing"),
    "auxiliary not averaged": ("auxiliary", DATA, "it is summed over dp, and not averaged"),
    "auxiliary own": ("auxiliary", DATA, "it is the replica's own: it is not averaged over dp"),
    "auxiliary summed over microbatches": ("auxiliary", DATA, "it is summed over the microbatches, and not averaged"),
}


def right(seed, meshes, tied, clip=None):
    return check_loss(Step(clip=clip, tied=tied), reference, TIED if tied else UNTIED, meshes=meshes, clip=clip, seed=seed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_right_step_passes_on_every_axis(tied):
    assert right(0, MESHES[1:10:2], tied, clip=0.05) == 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_right_programs_pass():
    count = sum(right(seed, MESHES, tied, clip) for seed in (1, 2) for tied in (False, True) for clip in (None, 0.05))
    assert count == 8 * 3 * len(MESHES) == 264


def told(step, weights, **options):
    with pytest.raises(AssertionError) as caught:
        check_loss(step, reference, weights, **options)
    return str(caught.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_usual_mistake_is_named(mistake, seed):
    term, meshes, words = MISTAKES[mistake]
    tied = "tied" in mistake
    text = told(Step(mistake, tied=tied), TIED if tied else UNTIED, meshes=meshes, seed=seed)
    assert re.search(rf"^on .* valid tokens: the {term} differs.* from that of one device\nprobably: ", text)
    assert words in text.splitlines()[1]


@pytest.mark.parametrize("mistake", ["norm of own pieces", "norm counts replicated", "norm of all ranks"])
def test_clipping_by_a_wrong_norm_is_named_where_the_norm_is_not_returned(mistake):
    def step(device, weights, microbatches):
        return {name: value for name, value in Step(mistake, 0.05)(device, weights, microbatches).items() if name != "norm"}

    text = told(step, UNTIED, meshes=[{"dp": 2, "tp": 2}], clip=0.05)
    words = MISTAKES[mistake][2].removeprefix("it is ")
    assert f"probably: it is clipped by a wrong norm: {words}" in text


def test_the_right_value_is_never_shown():
    def step(device, weights, microbatches):
        return Step()(device, weights, microbatches) | {"loss": 1234.5}

    text = told(step, UNTIED, meshes=[{"dp": 2}])
    assert re.fullmatch(r"on dp=2, 1 microbatch, \d+ and \d+ valid tokens: the loss differs from that of one device", text)


@pytest.mark.parametrize(("change", "words"), [
    (lambda terms: terms.pop("grad.gain"), "ranks 0 and 1 returned no 'grad.gain'"),
    (lambda terms: terms.pop("loss"), "ranks 0 and 1 returned no 'loss'"),
    (lambda terms: terms.update(loss=np.nan), "the loss is not finite on ranks 0 and 1: a microbatch has no valid token"),
    (lambda terms: terms.update({"grad.gain": np.zeros((1, 3))}),
     "the gradient of 'gain' has shape (1, 3) on rank 0, expected (3,)"),
])
def test_a_term_that_cannot_be_compared(change, words):
    def step(device, weights, microbatches):
        terms = Step()(device, weights, microbatches)
        change(terms)
        return terms

    assert words in told(step, UNTIED, meshes=[{"dp": 2}])


def test_terms_and_axes_that_are_not_known():
    with pytest.raises(ValueError, match=r"train_step returns 'los', which the reference does not have: loss, grad.gain"):
        check_loss(lambda *given: Step()(*given) | {"los": 1}, reference, UNTIED, meshes=[{"dp": 1}])
    with pytest.raises(ValueError, match="check_loss splits over dp, cp, pp, tp, got an axis 'ep'"):
        check_loss(Step(), reference, UNTIED, meshes=[{"ep": 2}])


def test_an_error_of_the_step_leaves_with_the_case():
    def step(device, weights, microbatches):
        raise LookupError("planted")

    with pytest.raises(DeviceFailedError, match="planted") as caught:
        check_loss(step, reference, UNTIED, meshes=[{"dp": 2}])
    assert re.fullmatch(r"in check_loss on dp=2, 1 microbatch, \d+ and \d+ valid tokens", caught.value.__notes__[0])


def test_without_weights_there_is_one_with_a_number_for_each_word():
    def one_device(weights, batch):
        error = (weights["w"][batch.tokens] - batch.targets) * batch.valid
        gradient = np.zeros(5)
        np.add.at(gradient, batch.tokens, 2 * error / batch.valid.sum())
        return {"loss": (error**2).sum() / batch.valid.sum(), "grad.w": gradient}

    def many_devices(device, weights, microbatches):
        count = device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "dp")
        terms = [(batch.valid.sum() / count, one_device(weights, batch)) for batch in microbatches if batch.valid.any()]
        loss, gradient = (sum((part * each[name] for part, each in terms), np.zeros(5) if name == "grad.w" else 0.0)
                          for name in ("loss", "grad.w"))
        return {"loss": device.all_reduce(loss, "dp"), "grad.w": device.all_reduce(gradient, "dp")}

    assert check_loss(many_devices, one_device, meshes=[{"dp": 3}], vocabulary=5) == 3
