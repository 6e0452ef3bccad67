"""Published runs of serving: the stacks say of themselves what the runs give, and the held out ones are within the bounds."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism.hardware import Hardware
from vcluster.calibration import serving


def test_the_table_has_the_published_runs_with_their_sources():
    runs, loaded = serving.runs(), serving.loaded_runs()
    assert (len(runs), len(loaded)) == (17, 10)
    assert runs[4].measured == (0.9208, 0.03211, 6048.4) and loaded[0].tokens_per_second == 28312
    assert all(row["source"].startswith("github ") for kind in ("serving", "max throughput") for row in serving._rows(kind))


@pytest.mark.slow
def test_the_stack_tells_the_errors_that_its_runs_have():
    held, own = [run for run in serving.runs() if run.held_out], [run for run in serving.runs() if not run.held_out]
    validation = Hardware.preset(serving.A100).validation
    told = {(each.what.removesuffix(" of Llama 3 8B"), each.held_out): each for each in validation}
    mean = np.abs(serving.errors(held)).mean(axis=0)
    for error, what in zip(mean, ("times to the first token", "times of a token", "throughputs"), strict=True):
        assert told[what, True].mean_error == pytest.approx(error, abs=0.0015) and told[what, True].rows == len(held)
    assert mean[1] < 0.10 and mean[0] < 0.30
    fitted = np.abs(serving.errors(own)).mean(axis=0)
    assert told["times of a token", False].mean_error == pytest.approx(fitted[1], abs=0.0015)


def test_a_run_is_predicted_near_its_measurement():
    run = serving.runs()[1]
    first, token, throughput = serving.predicted(run)
    assert token == pytest.approx(run.measured[1], rel=0.05) and throughput == pytest.approx(run.measured[2], rel=0.05)
    assert first == pytest.approx(run.measured[0], rel=0.3)


def test_throughput_at_maximum_load_is_that_of_the_runs():
    errors = [serving.loaded_throughput(run) / run.tokens_per_second - 1 for run in serving.loaded_runs()]
    assert np.abs(errors).max() < 0.08 and np.abs(errors).mean() < 0.03


def test_a_step_of_all_clients_takes_about_the_token_that_is_predicted():
    run = serving.runs()[1]
    spent = serving.parts(run)
    assert all(each > 0 for each in spent)
    assert spent.seconds == pytest.approx(serving.predicted(run)[1], rel=0.1)
