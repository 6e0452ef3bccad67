from .recording import record as record
