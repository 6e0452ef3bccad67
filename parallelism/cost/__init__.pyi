from .cost import CollectiveCost as CollectiveCost, Costs as Costs
from .hierarchical import HIERARCHICAL as HIERARCHICAL
from .torus import TORUS as TORUS
