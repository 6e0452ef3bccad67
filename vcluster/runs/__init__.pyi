from .cluster import VirtualCluster as VirtualCluster
from .run import Run as Run
from .run_loop import print_with_rank as print_with_rank
