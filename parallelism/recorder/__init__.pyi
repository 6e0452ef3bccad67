from .recorder import record as record
