from .curve_chart import curves as curves
from .drawing import MOST_HTML as MOST_HTML, MOST_ROWS as MOST_ROWS, Drawing as Drawing
from .progress_line import Told as Told, progress as progress
from .quantities import (
    WIDTH as WIDTH,
    given_seconds as given_seconds,
    in_columns as in_columns,
    shortened as shortened,
)
