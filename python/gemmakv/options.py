"""Keywords of generation, for annotations of your own functions."""

from gemmakv.generation._options import BatchOptions, LogitBias, Options, Stop

__all__ = ["BatchOptions", "LogitBias", "Options", "Stop"]
