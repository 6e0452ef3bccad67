from .dispatch import kept_by_expert as kept_by_expert, rows_received as rows_received
from .experts import (
    MixtureOfExperts as MixtureOfExperts,
    MixtureOfExpertsSharding as MixtureOfExpertsSharding,
)
