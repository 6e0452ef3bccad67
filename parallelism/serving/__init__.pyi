from .engine import Engine as Engine, EngineSettings as EngineSettings
from .generation import generate as generate
from .plans import ServingPlan as ServingPlan, ServingPlans as ServingPlans
from .precision import Precision as Precision
from .prices import StepPrices as StepPrices
from .requests import Request as Request, Sampling as Sampling
from .search import find_serving as find_serving
from .serve import Served as Served, run_engine as run_engine
from .served_model import ServedModel as ServedModel
from .workloads import PricedRun as PricedRun, Workload as Workload
