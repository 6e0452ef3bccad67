"""A setting that somebody registers is searched, named, told, simulated and run as those of the package."""

import numpy as np
import pytest

from parallelism import models
from parallelism.planning import SETTINGS, Setting, find_plan, register_setting, settings
from parallelism.transforms import Fused, MixedPrecision
from vcluster.runs.verified import verified

SPEC = models.TransformerSpec(layers=2, width=64, heads=4, vocabulary=96, sequence=32)
FIXED = {"hardware": "dgx-h100", "devices": 4, "batch": 8, "recompute": "none", "zero": 0}

NARROW = Setting(
    "narrow", settings.switch, lambda model: (0, 1), is_switch=True,
    useful=lambda columns: columns["tp"] > 1, needs="narrow needs tp above 1",
    transform=lambda model, given: MixedPrecision("bfloat16") if given["narrow"] else None,
    words=lambda given: "narrow" if given["narrow"] else "", from_pieces=settings.always)
"""Products in bfloat16, where weights are split."""

FUSED = Setting(
    "fused", settings.switch, lambda model: (0, 1), is_switch=True,
    transform=lambda model, given: Fused() if given["fused"] else None,
    words=lambda given: "fused" if given["fused"] else "")
"""Plans with it are not put together from pieces."""


@pytest.fixture(params=[NARROW, FUSED], ids=["narrow", "fused"])
def setting(request):
    register_setting(request.param)
    yield request.param
    settings.forget_setting(request.param.name)


@pytest.mark.slow
def test_it_is_searched_told_and_simulated(setting):
    plans = find_plan(SPEC, tp=2, **FIXED)
    with_it = [plan for plan in plans if plan.settings[setting.name]]
    assert 0 < len(with_it) < len(plans)
    assert all(f" {setting.name} mb=" in plan.split for plan in with_it)
    for plan in plans:
        trace = plan.simulate(link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        assert plan.peak_bytes == max(trace.peaks().values())


@pytest.mark.slow
def test_it_is_explained_and_scaled_down_it_runs(setting):
    only = find_plan(SPEC, tp=2, dp=2, microbatch=4, **{setting.name: True}, **FIXED)
    assert str(setting.transform(None, {setting.name: True})) in str(only.best.strategy)
    both = find_plan(SPEC, tp=2, dp=2, microbatch=4, **FIXED)
    other = not both.best.settings[setting.name]
    assert f"the best plan with {setting.name}={other}" in both.best.why_not(**{setting.name: other})
    assert verified(only.best.scaled_down(), only.task.hardware, backend="thread").differences == ()


@pytest.mark.takes_seconds
def test_it_is_refused_where_it_is_not_useful_and_for_other_values():
    register_setting(NARROW)
    try:
        found = find_plan(SPEC, tp=[1, 2], narrow=True, sp=False, microbatch=2, pp=1, simulations=1, **FIXED | {"devices": 2})
        assert found.refused["narrow needs tp above 1"].count > 0
        assert {plan.settings["tp"] for plan in found} == {2}
        with pytest.raises(ValueError, match="narrow must be True or False, got 'much'"):
            find_plan(SPEC, narrow="much", **FIXED)
        with pytest.raises(ValueError, match="a setting 'narrow' is there already"):
            register_setting(NARROW)
    finally:
        settings.forget_setting("narrow")
    with pytest.raises(ValueError, match="a plan has no setting 'narrow'"):
        find_plan(SPEC, narrow=True, **FIXED)
    with pytest.raises(ValueError, match="no setting 'tp' was registered"):
        settings.forget_setting("tp")


def test_every_setting_has_a_check_that_refuses_what_it_is_not():
    model = settings.TrainedModel.of(SPEC, None)
    for name in SETTINGS:
        with pytest.raises(ValueError, match=name if name != "order" else "order must name"):
            settings.checked_settings({name: np.array([1.5])}, model)


def test_values_that_are_no_integers_are_refused():
    shares = Setting("share", lambda name, value, model: float(value), lambda model: (0.5, 1.0))
    register_setting(shares)
    try:
        with pytest.raises(TypeError, match=r"the setting share must be integers, .* got 0.5"):
            find_plan(SPEC, **FIXED)
    finally:
        settings.forget_setting("share")
