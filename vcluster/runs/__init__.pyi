from .cluster import VirtualCluster as VirtualCluster
from .run import Run as Run
from .run_loop import show_with_rank as show_with_rank
