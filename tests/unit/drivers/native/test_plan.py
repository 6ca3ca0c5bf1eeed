"""Promises of a plan (pure: no box is made):
1. Paths of the image are resolved only after the pivot: what is mounted into the box's root comes after it.
2. /proc is mounted before the old root goes, and closed to writing after nested namespaces are switched off.
3. A limit that a cgroup keeps is not kept twice; one that none keeps falls to an rlimit.
4. Slots count the same for a root node, which passes trees, and an ordinary one, which has them cloned.
5. A box on the host's network brings up no loopback, has no sysfs, and knows who resolves names; any other makes a
   network of its own.
"""

from __future__ import annotations

import resource

from sandlot.api import Limits, SandboxSpec, Volume
from sandlot.drivers.images import Image
from sandlot.drivers.native.plan import NODEV, NOSUID, READ_ONLY, Do, Host, make_plan
from sandlot.drivers.native.wire import Key

IMAGE = Image("host", "/images/host", (("/usr", "/usr"),))
SPEC = SandboxSpec(
    volumes=(Volume(source="/data", target="/in"), Volume(source="/out", target="/out", read_only=False))
)
ROOT = Host(root=True, stage="/tmp", pids_by_cgroup=True)
USER = Host(root=False, stage="/tmp", pids_by_cgroup=False)


def test_what_goes_into_the_boxes_root_is_mounted_after_the_pivot() -> None:
    steps = make_plan(SPEC, IMAGE, ROOT).steps
    pivot = [step.kind for step in steps].index(Do.PIVOT)
    assert all(step.target.startswith("/tmp") or step.kind is Do.CLONE for step in steps[: pivot + 1])
    assert not any(step.target.startswith("/tmp/") for step in steps[pivot + 1 :])


def test_proc_is_mounted_while_the_old_one_is_visible_and_closed_last() -> None:
    steps = make_plan(SPEC, IMAGE, ROOT).steps
    order = [(step.kind, step.target) for step in steps]
    assert order.index((Do.MOUNT, "/proc")) < order.index((Do.DETACH, ""))
    assert order.index((Do.WRITE, "/proc/sys/user/max_user_namespaces")) < order.index((Do.BIND, "/proc/sys"))
    assert [step.flags & READ_ONLY for step in steps if step.target == "/proc/sys" and step.kind is Do.BIND] == [
        READ_ONLY
    ]


def test_slots_count_the_same_for_root_and_ordinary_nodes() -> None:
    for host in (ROOT, USER):
        plan = make_plan(SPEC, IMAGE, host)
        assert plan.sources == ("/images/host", "/usr", "/data", "/out")
        cloned = [step.source for step in plan.steps if step.kind is Do.CLONE]
        trees = [*(plan.sources if host.root else ()), *cloned]
        attached = {step.target: trees[step.slot] for step in plan.steps if step.kind is Do.ATTACH}
        assert attached == {
            "/tmp/lower0": "/images/host",
            "/dev": "/tmp/dev",
            "/usr": "/usr",
            "/in": "/data",
            "/out": "/out",
        }


def test_volumes_carry_their_rights() -> None:
    flags = {step.target: step.flags for step in make_plan(SPEC, IMAGE, ROOT).steps if step.kind is Do.ATTACH}
    assert flags["/in"] == READ_ONLY | NODEV | NOSUID
    assert flags["/out"] == NODEV | NOSUID


def test_a_limit_is_kept_once() -> None:
    spec = SandboxSpec(limits=Limits(pids=77, open_files=99), lifetime=1.5)
    by_cgroup = make_plan(spec, IMAGE, ROOT)
    nothing = (resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)
    assert by_cgroup.rlimits == ((resource.RLIMIT_NOFILE, 99), *((kind, 0) for kind in nothing))
    assert (resource.RLIMIT_NPROC, 77) in make_plan(spec, IMAGE, USER).rlimits
    assert by_cgroup.lifetime_ms == 1500


def test_the_same_spec_gives_the_same_plan() -> None:
    assert make_plan(SPEC, IMAGE, ROOT) == make_plan(SPEC, IMAGE, ROOT)


def test_a_network_is_made_or_the_hosts_is_used() -> None:
    image = Image("host", "/images/host", networked=(("/etc/ssl/certs", "/etc/ssl/certs"),))
    host = Host(root=True, stage="/tmp", pids_by_cgroup=True, resolver="/run/resolv.conf")
    for network, made in (("none", True), ("host", False)):
        plan = make_plan(SandboxSpec.model_validate({"network": network}), image, host)
        kinds = [step.kind for step in plan.steps]
        assert plan.host_network is not made
        assert (Key.NETWORK, int(not made)) in plan.fields(None, range(0))
        assert (Do.LOOPBACK in kinds, any(step.text == "sysfs" for step in plan.steps)) == (made, made)
        assert ("/run/resolv.conf" in plan.sources, "/etc/ssl/certs" in plan.sources) == (not made, not made)
        resolver = [step.flags for step in plan.steps if step.target == "/etc/resolv.conf"]
        assert resolver == ([] if made else [READ_ONLY | NODEV | NOSUID])
