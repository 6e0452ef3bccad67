from .mesh import Axes as Axes, Mesh as Mesh, MeshIndex as MeshIndex
from .stablehlo_groups import replica_groups as replica_groups
from .uneven import split_sizes as split_sizes
