from .budget import Budget as Budget
from .failures import Failures as Failures, Survival as Survival
from .search import find_budget as find_budget
from .sweep import Cell as Cell, Sweep as Sweep
