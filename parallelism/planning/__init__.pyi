from .plan import Plan as Plan
from .plans import NoPlanFits as NoPlanFits, Plans as Plans
from .search import find_plan as find_plan
from .settings import SETTINGS as SETTINGS, Setting as Setting, register_setting as register_setting
from .space import Refused as Refused
