from .plan import Plan as Plan
from .plans import NoPlanFits as NoPlanFits, Plans as Plans
from .search import find_plan as find_plan
from .space import SETTINGS as SETTINGS, Refused as Refused
