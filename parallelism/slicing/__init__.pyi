from .dynamic_program import best_slicing as best_slicing, best_slicings as best_slicings
from .search import find_slicing as find_slicing
from .sliced_plans import SlicedPlan as SlicedPlan, SlicedPlans as SlicedPlans, SlicingTask as SlicingTask
from .slices import NoSlicingFits as NoSlicingFits, Slice as Slice, Slices as Slices, Slicing as Slicing
