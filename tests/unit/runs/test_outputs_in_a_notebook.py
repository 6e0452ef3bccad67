"""The output of a rank in the picture of a run is one line."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from vcluster.runs.notebook import shown_output


@pytest.mark.parametrize(("value", "told"), [
    (np.full((300, 200), 1200.0), "float64[300, 200]  1200 .. 1200"),
    (np.arange(13, dtype=np.int8), "int8[13]  0 .. 12"),
    (np.arange(12).reshape(2, 6), "int64[2, 6]  [[ 0 1 2 3 4 5] [ 6 7 8 9 10 11]]"),
    (np.empty((0, 3), np.float32), "float32[0, 3]  []"),
    (np.float64(2.5), "np.float64(2.5)"),
    (np.array(2.5), "float64[]  2.5"),
    ({"a": np.zeros((2, 2)), "b": "<x>"}, "{'a': array([[0., 0.], [0., 0.]]), 'b': '&lt;x&gt;'}"),
    (None, "None"),
])
def test_an_output_is_one_line(value, told):
    assert shown_output(value) == f"<code>{told}</code>"


def test_a_long_one_is_cut_and_other_numbers_are_as_numpy_shows_them():
    assert len(shown_output("x" * 1000)) == len("<code></code>") + 100
    assert shown_output(np.ones(20, bfloat16)).startswith("<code>bfloat16[20]  [1 1 1 ")
