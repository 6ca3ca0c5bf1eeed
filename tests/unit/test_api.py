"""Promises of the shared words: what cannot be is refused where it is said, before anything starts.

1. A volume is at an absolute, plain place of its own, never at / or over the kernel's file systems; 32 are enough.
2. A limit on memory with which nothing starts is refused.
3. A limit that the kernel would take for none, or that no machine has, is refused, and so is what is no number.
4. What is allowed by the same rules goes through.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sandlot.api import Limits, Run, SandboxSpec, Volume


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("relative", "/mnt", "source\n.*'relative' is not an absolute path"),
        ("", "/mnt", "source\n.*is not an absolute path"),
        ("/tmp\0x", "/mnt", "source\n.*is not an absolute path"),
        ("/tmp", "mnt", "target\n.*'mnt' is not an absolute path"),
        ("/tmp", "/mnt/../etc", "write it as /etc"),
        ("/tmp", "/./mnt", "write it as /mnt"),
        ("/tmp", "/mnt//x", "write it as /mnt/x"),
        ("/tmp", "//mnt", "write it as /mnt"),
        ("/tmp", "/mnt/", "write it as /mnt"),
        ("/tmp", "/", "/ cannot be replaced"),
        ("/tmp", "//", "write it as /"),
        ("/tmp", "/proc", "/proc cannot be replaced"),
        ("/tmp", "/proc/sys/kernel", "/proc/sys/kernel cannot be replaced"),
        ("/tmp", "/sys/fs", "/sys/fs cannot be replaced"),
        ("/tmp", "/dev/shm", "/dev/shm cannot be replaced"),
    ],
)
def test_a_volume_is_at_a_plain_place(source: str, target: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Volume(source=source, target=target)


@pytest.mark.parametrize("target", ["/mnt", "/mnt/a b", "/process", "/devices", "/root/.config", "/a..b/c"])
def test_other_places_are_fine(target: str) -> None:
    assert Volume(source="/tmp/../tmp", target=target).target == target


def test_volumes_have_places_of_their_own_and_are_not_too_many() -> None:
    def volumes(*targets: str) -> dict[str, Any]:
        return {"volumes": [{"source": "/tmp", "target": target} for target in targets]}

    with pytest.raises(ValidationError, match="two volumes are at /a"):
        SandboxSpec.model_validate(volumes("/a", "/b", "/a"))
    with pytest.raises(ValidationError, match="33 volumes are more than the 32 that a sandbox may have"):
        SandboxSpec.model_validate(volumes(*(f"/v{i}" for i in range(33))))
    assert len(SandboxSpec.model_validate(volumes(*(f"/v{i}" for i in range(32)))).volumes) == 32


def test_memory_with_which_nothing_starts_is_refused() -> None:
    for memory in (0, 4096, "7M"):
        with pytest.raises(ValidationError, match=r"no sandbox starts with .* bytes of memory; give it 8M or more"):
            Limits.model_validate({"memory": memory})
    assert Limits.model_validate({"memory": "8M"}).memory == 8 << 20
    assert Limits(memory=None).memory is None


FAR = [1 << 62, 1 << 64, 1 << 70, 10**23]


@pytest.mark.parametrize("name", ["memory", "disk", "inodes", "pids", "open_files", "cpus", "output"])
def test_a_limit_that_wraps_around_to_none_is_refused(name: str) -> None:
    for value in FAR:
        with pytest.raises(ValidationError, match=name):
            Limits.model_validate({name: value})
    for text in ("9" * 400 + "g", "1" * 30, "nan", "inf"):
        with pytest.raises(ValidationError, match=name):
            Limits.model_validate({name: text})


@pytest.mark.parametrize(
    "words", [{"disk": 0}, {"disk": "1"}, {"inodes": 0}, {"pids": 0}, {"cpus": 0}, {"cpus": 0.001}]
)
def test_a_limit_of_nothing_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(words))):
        Limits.model_validate(words)


def test_the_least_and_the_most_are_fine() -> None:
    least = {"memory": "8M", "disk": "4K", "inodes": 64, "pids": 2, "cpus": 0.01, "open_files": 16, "output": 0}
    most = {"memory": "1024T", "disk": "1024T", "inodes": 1 << 32, "pids": 1 << 30, "cpus": 1e5, "open_files": 1 << 30}
    for words in (least, most):
        assert Limits.model_validate(words).model_fields_set == words.keys()


@pytest.mark.parametrize("value", ["inf", "nan", float("inf"), float("nan"), 1e308, 1e17, -1, 0])
def test_a_time_that_no_clock_reaches_is_refused(value: Any) -> None:
    for name in ("lifetime", "idle_timeout"):
        with pytest.raises(ValidationError, match=name):
            SandboxSpec.model_validate({name: value})
    with pytest.raises(ValidationError, match="timeout"):
        Run.model_validate({"argv": ["true"], "timeout": value})
    with pytest.raises(ValidationError, match="cpus"):
        Limits.model_validate({"cpus": value})
