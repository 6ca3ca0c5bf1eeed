"""How much may start now: the admission rule. Pure.

An asynchronous run may be at most `max_staleness` versions ahead of the policy it feeds. A batch is `batch` groups and
each batch makes one version, so what has been accepted and what is under way may together fill the batches up to
`max_staleness + 1` beyond those that made the current version:

    min(max_running - running, (max_staleness + version + 1) * batch - (accepted + running)) > 0

(AReaL, arXiv 2505.24298, §5.1). It is counted here in whole groups, because a group comes out whole: counted in single
episodes, the last places could go to half a group that nobody completes.
"""

from __future__ import annotations

import math


def groups(version: int, accepted: int, underway: int, *, batch: int, max_staleness: float) -> int:
    """How many more groups may start. `version`: versions made since this count began; `accepted`: groups that were
    handed on and are not known to be useless; `underway`: groups with members to run or running."""
    return max(0, math.floor((max_staleness + version + 1) * batch) - (accepted + underway))


def episodes(running: int, *, max_running: int) -> int:
    """How many more members of groups that have started may run."""
    return max(0, max_running - running)


def too_old(age: int, version: int, max_staleness: float) -> bool:
    """Whether what was sampled at version `age` may no longer be learned from at `version`."""
    return version - age > max_staleness
