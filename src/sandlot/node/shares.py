"""How much each tenant has in use at once, and whether more fits its quota. Plain sums, without tasks.

A share is taken before a box is made and given back when its sandbox has ended, or was never made; so what is counted
is what lives and what is on its way, whichever way it came (created, forked, adopted) and however often it was reset.
What a quota is, is decided elsewhere, and asked for each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandlot.api import Quota, SandboxSpec
from sandlot.errors import InvalidRequest, QuotaExceeded

QuotaOf = Callable[[str], Quota | None]


def no_quota(tenant: str) -> Quota | None:
    """Of a node whose tenants may use all of it."""
    return None


@dataclass(slots=True)
class _Use:
    boxes: int = 0
    millicpus: int = 0  # whole numbers: a sum of fractions would not come back to nothing
    memory: int = 0


class Shares:
    """Those of one node."""

    def __init__(self, quota_of: QuotaOf = no_quota) -> None:
        self._quota_of = quota_of
        self._used: dict[str, _Use] = {}

    def take(self, spec: SandboxSpec) -> None:
        """Raises QuotaExceeded, and InvalidRequest for a sandbox without a limit on what there is a quota of."""
        if spec.tenant is not None:
            self._check(spec.tenant, spec)
        self.add(spec)

    def add(self, spec: SandboxSpec, times: int = 1) -> None:
        """Of a sandbox that is there, whatever a quota says."""
        if spec.tenant is None:
            return
        used = self._used.setdefault(spec.tenant, _Use())
        used.boxes += times
        used.millicpus += times * _millicpus(spec)
        used.memory += times * (spec.limits.memory or 0)
        if not used.boxes:
            del self._used[spec.tenant]

    def give(self, spec: SandboxSpec) -> None:
        self.add(spec, -1)

    def _check(self, tenant: str, spec: SandboxSpec) -> None:
        quota = self._quota_of(tenant)
        if quota is None:
            return
        for name, most in (("cpus", quota.cpus), ("memory", quota.memory)):
            if most is not None and getattr(spec.limits, name) is None:
                raise InvalidRequest(
                    f"tenant {tenant} has a quota of {name}, and this sandbox has no limit of its own",
                    f"name one: `limits.{name}`",
                )
        used = self._used.get(tenant, _Use())
        for what, have, more, most, unit in (
            ("sandboxes", used.boxes, 1, quota.boxes, 1),
            ("CPUs", used.millicpus, _millicpus(spec), None if quota.cpus is None else round(quota.cpus * 1000), 1000),
            ("GiB of memory", used.memory, spec.limits.memory or 0, quota.memory, 1 << 30),
        ):
            if most is not None and have + more > most:
                raise QuotaExceeded(
                    f"tenant {tenant} has {have / unit:g} of {most / unit:g} {what} in use, and asks for "
                    f"{more / unit:g} more",
                    "end some sandboxes, or make them smaller; who runs the server sets the quota",
                )


def _millicpus(spec: SandboxSpec) -> int:
    return round((spec.limits.cpus or 0) * 1000)
