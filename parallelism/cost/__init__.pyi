from .cost import CollectiveCost as CollectiveCost, Costs as Costs
from .mixed import MixedCosts as MixedCosts, costs_of as costs_of
