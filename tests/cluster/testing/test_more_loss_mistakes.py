"""`check_loss`: mistakes that are less usual, those of experts, and losses that a strategy splits."""

import re

import numpy as np
import pytest
from loss_models import Form
from loss_steps import DATA, EXPERTS, UNTIED, Run, Step

from parallelism import ir
from parallelism.transforms import DataParallel, Strategy
from vcluster import ClusterTimeoutError
from vcluster.testing import Batch, Weight, check_loss

ROWS = [{"dp": 2}, {"dp": 3, "tp": 2}]
SPARSE = [{"dp": 2, "ep": 2}, {"ep": 4}]


def told(*args, **options):
    with pytest.raises(AssertionError) as caught:
        check_loss(*args, **options)
    return str(caught.value)


class Wrong(Run):
    """A step with a mistake in one of its parts."""

    meshes, form = ROWS, UNTIED

    def own(self):
        return max(sum(int(batch.valid.sum()) for batch in self.microbatches), 1)

    def summed(self, sums, over):
        return self.device.all_reduce(sum(sums), over)


class OwnCount(Wrong):
    says = "the loss", "the sum of all is divided by the rank's own number of tokens, times the number of the ranks of dp"

    def mean(self, sums, over=DATA):
        return self.summed(sums, over) / self.own() / self.sizes["dp"]


class OwnCountAlone(Wrong):
    says = "the loss", "the sum of all is divided by the rank's own number of tokens, which is not summed over dp"

    def mean(self, sums, over=DATA):
        return self.summed(sums, over) / self.own()


class LargestCount(Wrong):
    says = "the loss", "the sum of all is divided by the largest number of tokens of the ranks of dp"

    def mean(self, sums, over=DATA):
        return self.summed(sums, over) / self.device.all_reduce(self.own(), "dp", op="max") / self.sizes["dp"]


class SummedInEachMicrobatch(Wrong):
    says = "the loss", "what is summed up so far is summed over dp in each microbatch, and so more than once"

    def mean(self, sums, over=DATA):
        total = 0.0 * sums[0]
        for each in sums:
            total = self.device.all_reduce(total + each, over)
        return total / self.count


class MeansOfDpOnlyInGradients(Wrong):
    says = "the gradient of 'embedding'", "a mean of means: the means of the ranks of dp count alike"

    def mean(self, sums, over=DATA):
        if np.ndim(sums[0]) == 0:
            return super().mean(sums, over)
        return self.device.all_reduce(sum(sums) / self.own(), over) / self.sizes["dp"]


class MeansOfMicrobatchesSummed(Wrong):
    says = "the loss", "they are over microbatches summed, then over dp averaged"

    def mean(self, sums, over=DATA):
        means = [each / max(int(batch.valid.sum()), 1) for each, batch in zip(sums, self.microbatches, strict=True)]
        return self.summed(means, over) / self.sizes["dp"]


class GainNotInNorm(Wrong):
    says = "the norm", "whole weights are not counted"

    def norm(self, gradients):
        return super().norm({name: value for name, value in gradients.items() if "gain" not in name})


class NotOverCp(Wrong):
    says = "the gradient of 'embedding'", "each rank of cp has its own part of it: they are not summed over cp"
    meshes = ({"cp": 2, "dp": 2}, {"cp": 3})

    def mean(self, sums, over=DATA):
        return self.summed(sums, over if np.ndim(sums[0]) == 0 else "dp") / self.count


class LastTokens(Wrong):
    says = "the loss", "the last token of each rank of cp is left out of the sum, and not of the number"
    meshes = ({"cp": 2}, {"cp": 3})

    def valid(self, batch):
        return batch.valid & (np.arange(batch.valid.shape[1]) < batch.valid.shape[1] - 1)


class LossOfTheFirstRank(Wrong):
    says = "the loss", "it is that of the first rank of dp: the tokens of the others are lost"

    def mean(self, sums, over=DATA):
        if np.ndim(sums[0]):
            return super().mean(sums, over)
        return self.device.broadcast(np.asarray(sum(sums) / self.own()), "dp")


class DifferentExpertsSummed(Wrong):
    says = "the gradient of '1.up'", "gradients of different experts are summed over ep"
    meshes, form = SPARSE, EXPERTS

    def gradient(self, name, sums):
        value = super().gradient(name, sums)
        return self.device.all_reduce(value, "ep") if "ep" in self.layouts.get(name, "") else value


class ExpertsTimesEp(Wrong):
    says = "the gradient of '1.up'", "it is multiplied by the size of ep"
    meshes, form = SPARSE, EXPERTS

    def gradient(self, name, sums):
        return super().gradient(name, sums) * (self.sizes["ep"] if "ep" in self.layouts.get(name, "") else 1)


class NormWithoutOtherExperts(Wrong):
    says = "the norm", "it is of the rank's own pieces: the squares are not summed over the ranks that hold the others"
    meshes, form = SPARSE, EXPERTS

    def norm(self, gradients):
        return np.sqrt(sum(float((value**2).sum()) for value in gradients.values()))


class BalanceByTokens(Wrong):
    says = "the auxiliary loss", "it is weighted by the number of valid tokens: each microbatch counts alike"
    meshes, form = [{"dp": 2}, *SPARSE], EXPERTS

    def balance(self, values):
        weighted = sum(value * batch.valid.sum() for value, batch in zip(values, self.microbatches, strict=True))
        return self.device.all_reduce(weighted, ("dp", "ep")) / self.count


class BalanceHasNoGradient(Wrong):
    says = "the gradient of 'embedding'", "that of the auxiliary loss in it: it is missing"
    meshes, form = [{"dp": 2}, *SPARSE], EXPERTS

    def gradient(self, name, sums):
        return self.mean([each[0] for each in sums], ("dp", "cp") if "ep" in self.layouts.get(name, "") else DATA)


class WrongStep(Step):
    def __init__(self, kind):
        super().__init__(kind.form)
        self.kind = kind

    def __call__(self, device, weights, microbatches):
        return self.kind(self, device, weights).terms(microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", Wrong.__subclasses__())
def test_a_less_usual_mistake_is_named(kind):
    text = told(WrongStep(kind), kind.form.loss, kind.form.weights, meshes=kind.meshes, seed=3)
    term, words = kind.says
    assert re.search(rf"valid tokens: {term} differs.* from that of one device\nprobably: .*{re.escape(words)}", text)


# -- of a tied weight the reference may give both parts -------------------------------------------------------------------


def test_of_a_tied_weight_one_part_counts():
    """The reference gives both parts of its gradient; the loss is a product of the two."""
    def reference(weights, batch):
        w, count = weights["w"], batch.valid.sum()
        first, last = (np.bincount(each[batch.valid], minlength=7) for each in (batch.tokens, batch.targets))
        return {"loss": (w[batch.tokens] + 2 * w[batch.targets])[batch.valid].sum() / count,
                "grad.w": [first / count, 2 * last / count]}

    def step(part):
        def run(device, weights, microbatches):
            count = device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "dp")
            whole = [(reference(weights, batch), batch.valid.sum() / count) for batch in microbatches if batch.valid.any()]
            loss = sum((terms["loss"] * share for terms, share in whole), 0.0)
            parts = sum((part(*terms["grad.w"]) * share for terms, share in whole), np.zeros(7))
            return {"loss": device.all_reduce(loss, "dp"), "grad.w": device.all_reduce(parts, "dp")}

        return run

    weights = {"w": Weight((7,), stages=(0, -1))}
    assert check_loss(step(lambda first, last: first + last), reference, weights, meshes=[{"dp": 2}]) == 3
    for part, words in ((lambda first, last: first, "only the part of the first stage counts"),
                        (lambda first, last: last, "only the part of the last stage counts"),
                        (lambda first, last: 2 * first + last, "the part of the first stage counts twice"),
                        (lambda first, last: (first + last) / 2, "the two parts of the tied weight are averaged")):
        assert words in told(step(part), reference, weights, meshes=[{"dp": 2}])


# -- losses that a strategy splits ----------------------------------------------------------------------------------------


def token_losses(weights, batch):
    logits = weights["embedding"][batch.tokens] @ weights["head"].T
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    logarithms = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return -np.take_along_axis(logarithms, batch.targets[..., None], axis=-1)[..., 0]


def masked(weights, batch):
    return np.where(batch.valid, token_losses(weights, batch), 0.0)


def right(weights, batch):
    return np.sum(masked(weights, batch)) / np.sum(batch.valid)


def over_all(weights, batch):
    return np.mean(masked(weights, batch))


def without_mask(weights, batch):
    return np.mean(token_losses(weights, batch))


def of_rows(weights, batch):
    return np.mean(np.sum(masked(weights, batch), axis=1) / np.maximum(np.sum(batch.valid, axis=1), 1))


def a_sum(weights, batch):
    return np.sum(masked(weights, batch))


SHAPES = {"embedding": Weight((7, 4)), "head": Weight((7, 4))}
SPLITS = {"dp tp": None, "dp cp": [{"dp": 2, "cp": 2}], "dp zero=3": [{"dp": 3}], "tp dp pp 1f1b:2": [{"pp": 2, "dp": 2}]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SPLITS)
def test_a_right_loss_passes_split_by_a_strategy(strategy):
    cases = check_loss(right, right, SHAPES, strategy=strategy, meshes=SPLITS[strategy], clip=0.1)
    assert cases == (18 if SPLITS[strategy] is None else 3)  # by default six meshes


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "words"), [
    (over_all, "padding counts as tokens: the sum is divided by the number of all of them"),
    (without_mask, "the mask is not applied: padding has a loss, too"),
    (of_rows, "a mean of means: the means of the rows count alike"),
    (a_sum, "it is a sum over tokens: it is not divided by their number"),
])
def test_a_wrong_loss_that_a_strategy_splits_is_named(loss, words):
    for strategy, meshes in (("dp tp", [{"dp": 2, "tp": 2}]), ("dp pp 1f1b:2", [{"dp": 2, "pp": 2}])):
        assert f"probably: {words}" in told(loss, right, SHAPES, strategy=strategy, meshes=meshes)


class Twice:
    """A transform of the user's own, with a mistake: the gradients are subtracted twice."""

    phase = 99

    def __call__(self, function):
        rate = 'value = 1.0} : () -> tensor<f64> region="update"'
        assert rate in str(function)
        return ir.parse(str(function).replace(rate, rate.replace("1.0", "2.0")))


@pytest.mark.slow
def test_a_mistake_of_a_transform_is_seen():
    strategy = Strategy(DataParallel(), Twice())
    text = told(right, right, SHAPES, strategy=strategy, meshes=[{"dp": 2}, {"dp": 3}])
    assert "the gradient of 'embedding' differs from that of one device" in text


@pytest.mark.slow
def test_a_recorded_program_and_experts_are_split_by_a_strategy():
    (rows,) = ir.symbols("B")
    types = {name: ir.TensorType("f64", weight.shape) for name, weight in SHAPES.items()}
    whole, words = ir.TensorType("i64", (rows, 5)), ir.TensorType("bool", (rows, 5))

    def loss(p, tokens, targets, valid):
        return right(p, Batch(tokens, targets, valid))

    program = ir.record(loss, types, whole, whole, words)
    assert check_loss(program, right, SHAPES, strategy="dp tp", meshes=[{"dp": 2}]) == 3
    form = Form(("dense", "experts"))
    assert check_loss(form.loss, form.loss, form.whole_weights, strategy="dp ep", meshes=[{"ep": 3, "dp": 2}]) == 3


@pytest.mark.slow
def test_the_auxiliary_loss_of_microbatches_is_not_that_of_a_batch():
    form = EXPERTS
    text = told(form.loss, form.loss, form.whole_weights, strategy="dp", meshes=[{"dp": 2}], auxiliary="microbatch")
    words = "that of the auxiliary loss in it: it is that of the whole batch, and not the mean of those of the microbatches"
    assert words in text


@pytest.mark.parametrize(("loss", "match"), [
    (lambda weights, batch: {"loss": right(weights, batch)}, "a plain loss returns a number, or two: .*; it returned dict"),
    (masked, r"it returned an array of shape \("),
    (lambda weights, batch: (right(weights, batch),) * 3, r"it returned .* and .* and "),
])
def test_a_plain_loss_returns_numbers(loss, match):
    for given in ((loss, right), (right, loss)):
        if given == (right, loss) and "dict" in match:
            continue  # of a reference these are the terms
        with pytest.raises(TypeError, match=match):
            check_loss(*given, SHAPES, strategy="dp", meshes=[{"dp": 2}])


def test_a_step_that_never_ends_is_ended_by_a_deadline():
    def endless(*given):
        while True:
            pass

    with pytest.raises(ClusterTimeoutError, match=r"computing at .*test_more_loss_mistakes\.py"):
        check_loss(endless, right, SHAPES, meshes=[{"dp": 2}], deadline_seconds=0.05)


def test_a_step_returns_terms_and_weights_are_weights():
    with pytest.raises(TypeError, match="train_step must return a dict of terms, got float from rank 0"):
        check_loss(lambda *given: 1.0, right, SHAPES, meshes=[{"dp": 2}])
    with pytest.raises(TypeError, match=r"the weight 'head' must be a Weight, as Weight\(\(7, 4\)\), got tuple"):
        check_loss(right, right, {"head": (7, 4)}, strategy="dp")


@pytest.mark.parametrize(("given", "match"), [
    ({"strategy": "dp", "meshes": [{"dp": 2, "tp": 2}]}, "the strategy splits nothing over 'tp', of which the mesh .* has 2"),
    ({"strategy": "dp:x"}, "check_loss splits over dp, cp, ep, pp, tp; the strategy dp:x splits over 'x'"),
    ({"strategy": "dp", "weights": {"w": Weight((7,), "[tp]")}},
     "the strategy says where the weight 'w' lies, so its layout and stages are not given"),
])
def test_what_a_strategy_does_not_take(given, match):
    with pytest.raises(ValueError, match=match):
        check_loss(right, right, given.pop("weights", SHAPES), **given)
