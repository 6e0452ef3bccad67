"""`check_loss`: right training steps pass on every split, and usual mistakes are named."""

import random
import re

import numpy as np
import pytest
from loss_models import KINDS, Form
from loss_steps import EXPERTS, TIED, UNTIED, Step

from vcluster import DeviceFailedError
from vcluster.testing import check_loss

MESHES = [{"dp": 1}, {"dp": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2, "tp": 3}, {"dp": 2, "cp": 2}, {"dp": 2, "pp": 2},
          {"cp": 3, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "cp": 2, "pp": 2}]
DATA = [{"dp": 2}, {"dp": 3, "tp": 2}]
AUXILIARY = "auxiliary loss"
MISTAKES = {
    "means of replicas": ("loss", DATA, "a mean of means: the means of the ranks of {rows} count alike"),
    "means of microbatches": ("loss", DATA, "a mean of means: the means of the microbatches count alike"),
    "means of all": ("loss", DATA, "the means of the ranks of {rows} and the microbatches count alike"),
    "means of cp": ("loss", [{"cp": 2}, {"cp": 3, "dp": 2}], "the means of the ranks of cp count alike"),
    "not over dp": ("loss", DATA, "it is of the rank's own tokens: it is not summed over {rows}"),
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
    "auxiliary not averaged": (AUXILIARY, DATA, "it is summed over {rows}, and not averaged"),
    "auxiliary own": (AUXILIARY, DATA, "it is the replica's own: it is not averaged over {rows}"),
    "auxiliary summed over microbatches": (AUXILIARY, DATA, "it is summed over the microbatches, and not averaged"),
    "gradient of the auxiliary not averaged": (
        "gradient of 'embedding'", DATA, "that of the auxiliary loss in it: it is summed over {rows} and the microbatches"),
}


def form_of(mistake):
    """The usual model with which a mistake can be made."""
    return TIED if "tied" in mistake else EXPERTS if "auxiliary" in mistake else UNTIED


@pytest.mark.slow
@pytest.mark.parametrize("form", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_right_step_passes_on_every_axis(form):
    assert check_loss(Step(form, clip=0.05), form.loss, form.weights, meshes=MESHES[1:10:2], clip=0.05) == 15


@pytest.mark.slow
def test_a_right_step_with_experts_passes():
    meshes = [{"dp": 2, "ep": 2}, {"ep": 3, "cp": 2}]
    assert check_loss(Step(EXPERTS), EXPERTS.loss, EXPERTS.weights, meshes=meshes) == 6


def drawn(rng, *axes):
    """A form and a mesh of at most 8 devices, with at least two along these axes."""
    while True:
        mesh = {axis: rng.choice([1, 1, 2, 3]) if axis not in axes else rng.choice([2, 3])
                for axis in ("dp", "cp", "ep", "pp", "tp")}
        if np.prod([*mesh.values()]) <= 8:
            break
    layers = [rng.choice(KINDS) for _ in range(rng.randint(mesh["pp"], 4))]
    if mesh["ep"] > 1 and "experts" not in layers:
        layers[rng.randrange(len(layers))] = "experts"
    begin = sorted(rng.sample(range(1, len(layers) + 1), mesh["pp"] - 1))
    return Form(tuple(layers), rng.random() < 0.3 and mesh["pp"] < 3, tuple(begin)), mesh


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100))
def test_random_right_programs_pass_on_random_splits(seed):
    """Two programs a seed: one against devices, one split by a strategy."""
    rng = random.Random(seed)
    form, mesh = drawn(rng)
    clip = rng.choice([None, 0.05])
    assert check_loss(Step(form, clip=clip), form.loss, form.weights, meshes=[mesh], clip=clip, seed=seed) == 3
    form, mesh = drawn(rng)
    microbatches = rng.choice([1, 2, 3]) if "experts" not in form.layers else 0
    words = ["dp", "cp" * (mesh["cp"] > 1), "ep" * (mesh["ep"] > 1), "tp" * (mesh["tp"] > 1),
             rng.choice(["", "zero=1", "zero=2"]) * (mesh["dp"] > 1)]
    if microbatches and mesh["pp"] > 1:
        words.append(f"pp {rng.choice(['gpipe', '1f1b'])}:{microbatches}")
    else:
        mesh["pp"] = 1
    strategy = " ".join(filter(None, words))
    assert check_loss(form.loss, form.loss, form.whole_weights, strategy=strategy, meshes=[mesh], clip=clip, seed=seed) == 3


def told(step, form, **options):
    with pytest.raises(AssertionError) as caught:
        check_loss(step, form.loss, form.weights, **options)
    return str(caught.value)


def named(mistake, form, meshes, seed):
    """Whether a mistake is told with its term and its words."""
    term, _, words = MISTAKES[mistake]
    rows = " and ".join(axis for axis in ("dp", "ep") if any(mesh.get(axis, 1) > 1 for mesh in meshes))
    text = told(Step(form, mistake), form, meshes=meshes, seed=seed)
    assert re.search(rf"^on .* valid tokens: the {term} differs.* from that of one device\nprobably: ", text)
    words = words.replace("{rows}", rows).replace("ranks of dp and ep", "ranks of dp and the ranks of ep")
    found = text.splitlines()[1]
    if like := re.search(r" \(or (.*) in place of (\w+): these meshes do not tell them apart\)$", found):
        assert {mesh[like[2]] for mesh in meshes} == {mesh[axis] for mesh in meshes for axis in like[1].split(" or ")}
        found = found if words in found else found.replace(like[2], re.search(" (dp|cp|ep|pp|tp)( |,|$)", words)[1])
    assert words in found


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_usual_mistake_is_named(mistake, seed):
    named(mistake, form_of(mistake), MISTAKES[mistake][1], seed)


NEEDED = {
    "tp": ("over tp", "norm counts replicated", "norm of all ranks", "norm of own pieces", "sum of norms", "world"),
    "cp": ("means of cp",), "pp": ("tied apart", "norm of the tied weight twice"),
}
"""The axes along which some mistakes need ranks; most need some along dp."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", range(4))
def test_usual_mistakes_are_named_on_splits_that_no_message_was_written_for(mistake, seed):
    """Models and meshes are drawn."""
    rng = random.Random(f"{mistake} {seed}")
    axes = [axis for axis, mistakes in NEEDED.items() if mistake in mistakes]
    if not axes or mistake in ("norm of all ranks", "world"):
        axes.append("dp")
    while True:
        form, mesh = drawn(rng, *axes)
        apart = "pp" in axes or mesh["pp"] == 1
        if apart and form.tied == ("tied" in mistake) and form.experts == ("auxiliary" in mistake) and (
                "norm" not in mistake or "gain" in form.layers) and (mistake != "world" or mesh["ep"] == 1):
            break
    named(mistake, form, [mesh], seed)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["norm of own pieces", "norm counts replicated", "norm of all ranks"])
def test_clipping_by_a_wrong_norm_is_named_where_the_norm_is_not_returned(mistake):
    def step(device, weights, microbatches):
        terms = Step(UNTIED, mistake, 0.05)(device, weights, microbatches)
        return {name: value for name, value in terms.items() if name != "norm"}

    text = told(step, UNTIED, meshes=[{"dp": 2, "tp": 2}], clip=0.05)
    words = MISTAKES[mistake][2].removeprefix("it is ")
    assert f"probably: it is clipped by a wrong norm: {words}" in text


def test_the_right_value_is_never_shown():
    def step(device, weights, microbatches):
        return Step()(device, weights, microbatches) | {"loss": 1234.5}

    text = told(step, UNTIED, meshes=[{"dp": 2}])
    assert re.fullmatch(r"on dp=2, 1 microbatch, \d+ and \d+ valid tokens: the loss differs from that of one device", text)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("change", "words"), [
    (lambda terms: terms.pop("grad.1.gain"), "ranks 0 and 1 returned no 'grad.1.gain'"),
    (lambda terms: terms.pop("loss"), "ranks 0 and 1 returned no 'loss'"),
    (lambda terms: terms.update(loss=np.nan), "the loss is not finite on ranks 0 and 1: a microbatch has no valid token"),
    (lambda terms: terms.update({"grad.1.gain": np.zeros((1, 3))}),
     "the gradient of '1.gain' has shape (1, 3) on rank 0, expected (3,)"),
])
def test_a_term_that_cannot_be_compared(change, words):
    def step(device, weights, microbatches):
        terms = Step()(device, weights, microbatches)
        change(terms)
        return terms

    assert words in told(step, UNTIED, meshes=[{"dp": 2}])


def test_terms_and_axes_that_are_not_known():
    with pytest.raises(ValueError, match=r"train_step returns 'los', which the reference does not have: loss, grad"):
        check_loss(lambda *given: Step()(*given) | {"los": 1}, UNTIED.loss, UNTIED.weights, meshes=[{"dp": 1}])
    with pytest.raises(ValueError, match="check_loss splits over dp, cp, ep, pp, tp, got an axis 'sp'"):
        check_loss(Step(), UNTIED.loss, UNTIED.weights, meshes=[{"sp": 2}])


def test_an_error_of_the_step_leaves_with_the_case():
    def step(device, weights, microbatches):
        raise LookupError("planted")

    with pytest.raises(DeviceFailedError, match="planted") as caught:
        check_loss(step, UNTIED.loss, UNTIED.weights, meshes=[{"dp": 2}])
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
