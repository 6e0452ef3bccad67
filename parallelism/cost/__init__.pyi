from .cost import CollectiveCost as CollectiveCost, Costs as Costs
