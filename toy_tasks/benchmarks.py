"""Adapters of four published benchmarks, imported only when --tasks names one. Each contributes a loader (tasks as
`Task`), verdicts (kinds of checks, in VERDICTS), and where the benchmark has them a world (WORLDS) and a user (USERS).
static: from the task's ground truth alone; official: the benchmark's own scorer; judge: a model."""
from envace_mini import UserError, require

BENCHMARKS = {}                                         # {name: loader(what follows the colon, cfg) -> tasks}

def load(where, cfg):
    """The tasks that --tasks names, as bfcl:base."""
    name, _, rest = where.partition(":")
    return BENCHMARKS[name](rest, cfg)
