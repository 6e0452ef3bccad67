"""What a cluster tells the logger ``vcluster`` about its devices."""

import sys


def log(message: str, *values: object) -> None:
    """Log at level INFO.

    ``logging`` takes milliseconds to import, so it is not imported here.  Where nothing has imported it, nothing
    listens.
    """
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger("vcluster").info(message, *values)
