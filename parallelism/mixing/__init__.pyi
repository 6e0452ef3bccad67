from .arrangements import Replicas as Replicas, Stages as Stages
from .plans import Alone as Alone, MixedPlan as MixedPlan, MixedPlans as MixedPlans
from .search import find_mixed as find_mixed
