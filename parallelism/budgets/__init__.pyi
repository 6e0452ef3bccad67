from .budget import Budget as Budget
from .search import find_budget as find_budget
from .sweep import Cell as Cell, Sweep as Sweep
