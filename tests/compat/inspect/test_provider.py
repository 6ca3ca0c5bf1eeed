"""Promises of the sandboxes that Inspect is given, beyond what its own suite asks, on a server and in this process:

1. A sandbox that ends under a command is SandboxUnavailableError within seconds, and for each call after that.
2. Output beyond the limit is OutputLimitExceededError with its head and tail; a timeout has what was said before.
3. Any size of input: a command that does not want it all is not waited for, and one that is given up is dead.
4. Files of any size up to the limit come back byte by byte; what is above it is refused without being read.
5. A config file or a SandlotConfig says what the sandboxes are; a mistake in it is named, and nothing is left.
6. Several sandboxes of one sample have names; the default is first.
7. `inspect sandbox cleanup sandlot` ends one, or all, and nothing that is not an eval's.
8. A config comes back from a log as it was, and the limits that were not named are still not named.
9. Users are named or numbered; one that is not there is a failed command, as is a program that is not.
10. Who looks into a sample on a server is told the command for it; a sandbox that has ended cannot be looked into.
11. Commands in sandboxes of this process are counted among Inspect's subprocesses, those on a server are not.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec, SandboxUnavailableError
from inspect_ai.util._concurrency import init_concurrency
from inspect_ai.util._sandbox.limits import override_max_read_file_size
from inspect_ai.util._subprocess import init_max_subprocesses

from sandlot.api import Limits
from sandlot.integrations.inspect import SandlotConfig, SandlotEnvironment, SandlotSandbox
from sandlot.sandbox import Sandbox
from tests.compat.inspect.places import sample

SLEEPS = ["sh", "-c", "touch started; exec sleep 100"]
HAS_STARTED = ["sh", "-c", "for i in $(seq 200); do [ -e started ] && exit 0; sleep 0.05; done; exit 1"]
HAS_ENDED = ["sh", "-c", "for i in $(seq 40); do pgrep -f '^sleep 100' >/dev/null || exit 0; sleep 0.05; done; exit 1"]


async def test_a_sandbox_that_ends_under_a_command_is_unavailable(environment: SandlotEnvironment) -> None:
    waiting = asyncio.ensure_future(environment.exec(SLEEPS))
    assert (await environment.exec(HAS_STARTED)).success
    began = time.monotonic()
    await environment._box.close()
    with pytest.raises(SandboxUnavailableError, match=environment._box.id):
        await waiting
    for call in (environment.exec(["true"]), environment.write_file("f", "x"), environment.read_file("f")):
        with pytest.raises(SandboxUnavailableError):
            await call
    assert time.monotonic() - began < 5


async def test_output_beyond_the_limit_is_said_with_its_head_and_tail(environment: SandlotEnvironment) -> None:
    text = "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo last"
    with pytest.raises(OutputLimitExceededError, match="10 MiB") as beyond:
        await environment.exec(["sh", "-c", text])
    kept = beyond.value.truncated_output or ""
    assert kept.startswith("first\n") and kept.endswith("last\n")
    assert f"[{20_000_011 - (10 << 20)} bytes were left out]" in kept


async def test_a_timeout_carries_what_was_said_before_it(environment: SandlotEnvironment) -> None:
    with pytest.raises(TimeoutError, match="1 s") as late:
        await environment.exec(["sh", "-c", "echo said; sleep 100"], timeout=1)
    assert late.value.truncated_output == "said\n"  # type: ignore[attr-defined]


async def test_input_that_nobody_wants_is_not_waited_for(environment: SandlotEnvironment) -> None:
    data = b"x" * (20 << 20)
    assert (await environment.exec(["true"], input=data)).success
    assert (await environment.exec(["head", "-c", "3"], input=data)).stdout == "xxx"
    with pytest.raises(TimeoutError):
        await environment.exec(["sleep", "100"], input=data, timeout=1)


@pytest.mark.parametrize("size", [0, 20 << 20])
async def test_a_command_that_is_given_up_is_dead(environment: SandlotEnvironment, size: int) -> None:
    working = asyncio.ensure_future(environment.exec(SLEEPS, input=b"x" * size))
    assert (await environment.exec(HAS_STARTED)).success
    assert not (await environment.exec(HAS_ENDED)).success
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert (await environment.exec(HAS_ENDED)).success  # a server notices that its caller hung up


async def test_files_of_any_size_up_to_the_limit_come_back(environment: SandlotEnvironment) -> None:
    data = bytes(range(251)) * ((70 << 20) // 251)  # more than one piece, and not a whole number of blocks
    await environment.write_file("deep/er/large", data)
    assert await environment.read_file("deep/er/large", text=False) == data
    assert await environment.read_file("/proc/self/comm") == "head\n"  # which says that it is empty
    assert (
        await environment.exec(["stat", "-c", "%U %a", "deep", "deep/er/large"])
    ).stdout == "nobody 755\nnobody 644\n"
    await environment.write_file("lines", "one\r\ntwo\n")
    assert await environment.read_file("lines") == "one\r\ntwo\n"
    await environment.write_file("bytes", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        await environment.read_file("bytes")
    with pytest.raises(FileNotFoundError, match="lines/below"):
        await environment.read_file("lines/below")
    with pytest.raises(OSError, match="lines/below"):
        await environment.write_file("lines/below", "x")
    for call in (environment.read_file("a\0b"), environment.write_file("a\0b", ""), environment.exec(["a\0b"])):
        with pytest.raises(ValueError, match="null byte"):
            await call


async def test_what_is_above_the_limit_is_refused_without_being_read(environment: SandlotEnvironment) -> None:
    assert (await environment.exec(["truncate", "-s", "500G", "huge"])).success
    with pytest.raises(OutputLimitExceededError, match="100 MiB"):
        await environment.read_file("huge", text=False)
    await environment.write_file("exact", b"x" * 1024)
    with override_max_read_file_size(1024):
        assert len(await environment.read_file("exact", text=False)) == 1024
    with override_max_read_file_size(1023), pytest.raises(OutputLimitExceededError, match="1023 bytes"):
        await environment.read_file("exact")


@pytest.mark.parametrize("place", ["server"], indirect=True)
@pytest.mark.parametrize("form", ["toml", "yaml", "model"])
async def test_a_config_says_what_the_sandboxes_are(place: str, form: str, tmp_path: Path) -> None:
    limits = Limits(memory=256 << 20, pids=77)  # type: ignore[arg-type]
    config: SandlotConfig | str = SandlotConfig(
        user="nobody", cwd="/work", env={"GREETING": "hello"}, limits=limits, others={"other": SandlotSandbox()}
    )
    if form == "toml":
        lines = ("user = 'nobody'", "cwd = '/work'", "env = {GREETING = 'hello'}", "[limits]", "memory = '256M'")
        config = str(tmp_path / "sandlot.toml")
        Path(config).write_text("\n".join((*lines, "pids = 77", "[others.other]", "")))
    if form == "yaml":
        lines = ("user: nobody", "cwd: /work", "env: {GREETING: hello}", "limits: {memory: 256M, pids: 77}")
        config = str(tmp_path / "sandlot.yaml")
        Path(config).write_text("\n".join((*lines, "others: {other: {}}", "")))
    async with sample(config) as environments:
        assert list(environments) == ["default", "other"]
        default, other = environments.values()
        assert default._box.id != other._box.id
        said = await default.exec(["sh", "-c", "id -un; pwd; echo $GREETING; stat -c %U ."])
        assert said.stdout == "nobody\n/work\nhello\nnobody\n"
        assert (await other.exec(["sh", "-c", "id -un; pwd; echo $GREETING"])).stdout == "root\n/root\n\n"
        info = await default._box.info()
        assert info.labels == {"inspect": "task", "inspect.sample": "1", "inspect.sandbox": "default"}
        fork = await default.exec(["sh", "-c", "for i in $(seq 100); do sleep 9 & done"])
        assert not fork.success and "fork" in fork.stderr  # pids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imagine = 'x'", "imagine"),
        ("limits = {memory = 'much'}", "memory"),
        ("image = 'nothing'", "nothing"),
        ("user = 'ann'", "ann"),
        ("= =", "sandlot.toml"),
        ("others = {more = {image = 'nothing'}}", "nothing"),
        ("cwd = '/proc/here'", "/proc/here"),
    ],
)
async def test_a_mistake_in_a_config_is_named_and_nothing_is_left(
    environment: SandlotEnvironment, place: str | None, tmp_path: Path, text: str, said: str
) -> None:
    config = tmp_path / "sandlot.toml"
    config.write_text(text)
    before = await environment._box._node.list()
    with pytest.raises(RuntimeError, match=said):
        await SandlotEnvironment.task_init("startup", str(config))
    assert await environment._box._node.list() == before
    with pytest.raises(RuntimeError, match="missing"):
        await SandlotEnvironment.task_init("startup", "missing.toml")


@pytest.mark.parametrize("place", ["server"], indirect=True)
async def test_cleanup_ends_one_or_all_and_nothing_else(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with await Sandbox.create(url=place) as foreign, sample() as one, sample() as two, sample() as three:
        ids = [each["default"]._box.id for each in (one, two, three)]
        await SandlotEnvironment.cli_cleanup(ids[1])
        assert capsys.readouterr().out == f"ended {ids[1]}\n"
        assert [(await each["default"]._box.info()).state for each in (one, two, three)] == [
            "running",
            "ended",
            "running",
        ]
        with pytest.raises(RuntimeError, match=foreign.id):
            await SandlotEnvironment.cli_cleanup(foreign.id)
        await SandlotEnvironment.cli_cleanup(None)
        assert sorted(capsys.readouterr().out.split()[1::2]) == sorted((ids[0], ids[2]))
        assert (await foreign.info()).state == "running"


def test_a_config_comes_back_from_a_log_as_it_was() -> None:
    config = SandlotConfig(
        user=5, limits=Limits(pids=9), env={"A": "b"}, others={"o": SandlotSandbox(image="debian:12")}
    )
    spec = SandboxEnvironmentSpec("sandlot", config)
    kept = json.loads(spec.model_dump_json(exclude_none=True))
    assert kept["config"] == {
        "user": 5,
        "limits": {"pids": 9},
        "env": {"A": "b"},
        "others": {"o": {"image": "debian:12"}},
    }
    back = SandboxEnvironmentSpec.model_validate(kept)
    assert back == spec and hash(back) == hash(spec)
    assert back.config.limits.model_fields_set == {"pids"}


async def test_a_user_by_name_or_number_and_one_that_is_not_there(environment: SandlotEnvironment) -> None:
    assert (await environment.exec(["id", "-u"])).stdout == "65534\n"
    assert (await environment.exec(["id", "-u"], user="1234")).stdout == "1234\n"
    assert (await environment.exec(["id", "-u"], user="root")).stdout == "0\n"
    nobody = await environment.exec(["id"], user="ann")
    assert (nobody.returncode, nobody.stdout) == (126, "") and "'ann'" in nobody.stderr
    missing = await environment.exec(["no-such-program"])
    assert (missing.returncode, missing.success) == (127, False)
    assert (await environment.exec(["sh", "-c", "exit 126"])).returncode == 126


async def test_who_looks_into_a_sample_is_told_the_command(environment: SandlotEnvironment, place: str | None) -> None:
    if place is None:
        with pytest.raises(NotImplementedError, match="SANDLOT_URL"):
            await environment.connection()
        return
    for user, named in ((None, "nobody"), ("root", "root")):
        command = (await environment.connection(user=user)).command
        assert command == f"sandlot shell --url {place} --user {named} {environment._box.id}"
    await environment._box.close()
    with pytest.raises(ConnectionError, match=environment._box.id):
        await environment.connection()


def test_another_loop_than_asyncio_s_is_refused() -> None:
    with pytest.raises(RuntimeError, match="INSPECT_ASYNC_BACKEND"):
        SandlotEnvironment.sample_init("task", None, {}).send(None)  # as trio would begin it


@pytest.mark.parametrize("counted", [True, False])
async def test_commands_of_this_process_are_counted_as_subprocesses(
    environment: SandlotEnvironment, place: str | None, counted: bool
) -> None:
    init_concurrency()
    init_max_subprocesses(1)
    # Each waits a while for the other to come.
    meet = "mkdir -p met; touch met/$1; for i in $(seq 40); do [ -e met/$2 ] && exit 0; sleep 0.05; done; exit 1"
    one, other = (
        environment.exec(["sh", "-c", meet, "sh", *names], concurrency=counted) for names in (("a", "b"), ("b", "a"))
    )
    results = await asyncio.gather(one, other)
    assert all(result.success for result in results) == (place is not None or not counted)
