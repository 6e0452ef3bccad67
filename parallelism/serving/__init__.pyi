from .engine import Engine as Engine, EngineSettings as EngineSettings
from .generation import generate as generate
from .requests import Request as Request, Sampling as Sampling
from .serve import Served as Served, run_engine as run_engine
from .served import ServedModel as ServedModel
