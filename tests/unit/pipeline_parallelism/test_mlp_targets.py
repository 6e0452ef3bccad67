"""The targets of a perceptron: classes go with one loss, arrays with the other."""

import numpy as np
import pytest

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from pipeline_parallelism import MLP


def test_class_labels_for_a_mean_squared_error_name_the_loss_for_classes():
    step = MLP((3, 5), Pipeline(1, 1)).train_step()
    with pytest.raises(ValueError, match="for classes as targets, the loss is 'softmax_cross_entropy'"):
        step.inputs(Mesh(pp=1), np.ones((4, 3)), np.array([0, 1, 2, 3]))
    with pytest.raises(ValueError, match=r"targets must have shape \(rows, 5\), got \(4, 3\)$"):
        step.inputs(Mesh(pp=1), np.ones((4, 3)), np.ones((4, 3)))
