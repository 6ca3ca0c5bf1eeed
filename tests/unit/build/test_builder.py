"""Promises of a build, over real sandboxes from the base `host`:

1. A step is done once: again only when it, a step before it, or the content or mode of a file that it copies changes.
2. Environment, user and workdir hold for the commands that follow and for sandboxes made from the image.
3. A command that fails is named with its line, its code and the end of its output; it, and a build that is given up,
   leave no sandbox and no image but the hidden steps before.
4. Commands have no network, and with the option this host's; what is made from the image has none.
5. COPY puts files where it does elsewhere; an error inside a step says which line.
6. A name is taken over from a built image only; a step is not listed, and stays when nodes come and go.
7. A build whose steps are pruned while it runs is finished; one whose base is replaced meanwhile is one over the new.
8. What of the base cannot be had here is refused: a directory, instructions for builds, a user of another group.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import ImageConfig, ImageInfo, Run, SandboxSpec
from sandlot.build import builder, dockerfile
from sandlot.build.builder import Options, Progress
from sandlot.build.context import Context
from sandlot.drivers import layers
from sandlot.errors import BuildFailed, Conflict, InvalidRequest, NotFound, Unsupported
from sandlot.node.node import Node, local_node


@pytest.fixture
async def node(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path / "state") as node:
        yield node
    async with local_node(tmp_path / "state") as last:  # it can remove what belongs to ids that are only lent
        for path in (tmp_path / "state/images").glob("*.json"):
            await last.delete_image(path.stem)


class Folder:
    """A context and its Dockerfile; what a build of it did."""

    def __init__(self, node: Node, path: Path) -> None:
        self.node = node
        self.path = path
        self.told: list[Progress] = []

    async def build(self, text: str, name: str = "made", **options: Any) -> ImageInfo:
        self.told = []
        what = dockerfile.parse(f"FROM host\n{text}", "Dockerfile", options.pop("args", {}))
        return await builder.build(self.node, what, name, Context(self.path), Options(**options), self.told.append)

    @property
    def cached(self) -> list[bool]:
        """Of the steps that make files."""
        done = [each for each in self.told if each.seconds is not None]
        return [
            each.cached
            for each in done
            if each.cached or each.step.text.split()[0] in ("RUN", "COPY", "WORKDIR", "USER")
        ]

    async def sh(self, text: str, image: str = "made", **more: Any) -> str:
        box = (await self.node.create(SandboxSpec(image=image))).id
        result = await self.node.run(box, Run(argv=("sh", "-c", text), **more))
        await self.node.destroy(box)
        assert result.ok, result
        return result.stdout


@pytest.fixture
def folder(node: Node, tmp_path: Path) -> Folder:
    (tmp_path / "context/src/deep").mkdir(parents=True)
    (tmp_path / "context/a").write_text("a\n")
    (tmp_path / "context/src/b").write_text("b\n")
    (tmp_path / "context/src/deep/c").write_text("c\n")
    (tmp_path / "context/src/link").symlink_to("deep/c")
    return Folder(node, tmp_path / "context")


TEXT = "WORKDIR /srv\nCOPY a ./\nRUN date +%N > now\n"


async def test_a_step_is_done_again_when_something_changes(folder: Folder) -> None:
    first = await folder.build(TEXT)
    assert (first.kind, first.base, folder.cached) == ("built", "host", [False, False, False])
    made = await folder.sh("cat now")
    assert await folder.build(TEXT) == first
    assert folder.cached == [True, True, True]
    os.utime(folder.path / "a", (0, 0))
    await folder.build(TEXT)
    assert folder.cached == [True, True, True]
    (folder.path / "a").write_text("A\n")
    await folder.build(TEXT)
    assert folder.cached == [True, False, False]
    assert await folder.sh("cat now") != made
    (folder.path / "a").chmod(0o755)
    await folder.build(TEXT)
    assert folder.cached == [True, False, False]
    (folder.path / "a").chmod(0o644)
    (folder.path / "a").write_text("a\n")
    await folder.build(TEXT)  # as at first
    assert folder.cached == [True, True, True]
    assert await folder.sh("cat now") == made
    await folder.build(TEXT + "ENV A=1\nRUN true\n")
    assert folder.cached == [True, True, True, False]
    await folder.build(TEXT + "ENV A=2\nRUN true\n")
    assert folder.cached == [True, True, True, False]
    await folder.build(TEXT, cache=False)
    assert folder.cached == [False, False, False]
    assert await folder.sh("cat now") != made


async def test_a_build_argument_counts_for_the_commands_that_see_it(folder: Folder) -> None:
    text = "RUN echo first\nARG V=1\nRUN echo $V > /v\n"
    await folder.build(text)
    await folder.build(text, args={"V": "2"})
    assert folder.cached == [True, False]
    assert await folder.sh("cat /v; echo ${V-none}") == "2\nnone\n"


async def test_environment_user_and_workdir_hold(folder: Folder, node: Node) -> None:
    name = "nobody" if await many_ids(node) else "root"
    text = (
        "ENV A='one two' PATH=/opt/x:$PATH\nWORKDIR /srv\nWORKDIR app\nRUN pwd > out; echo $A >> out; chmod 777 .\n"
        f"USER {name}\nRUN id -un > who; echo $PATH >> who\nENTRYPOINT exec x\nCMD y\nLABEL l=m\n"
    )
    made = await folder.build(text)
    expected = "/srv/app\none two\n"
    assert await folder.sh("cat out") == expected
    path = "/opt/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
    assert await folder.sh("cat who") == f"{name}\n{path}"
    assert await folder.sh("pwd; id -un; echo $A; echo $PATH") == f"/srv/app\n{name}\none two\n{path}"
    home = "/nonexistent" if name == "nobody" else "/root"
    assert made.config == ImageConfig(
        env={"A": "one two", "PATH": path.strip()},
        workdir="/srv/app",
        user=65534 if name == "nobody" else 0,
        home=home,
        entrypoint=("/bin/sh", "-c", "exec x"),
        cmd=("/bin/sh", "-c", "y"),
        labels={"l": "m"},
    )
    again = await folder.build("RUN true", name="again")
    assert again.config.workdir is None
    what = dockerfile.parse("FROM made\nRUN pwd > /srv/app/base\nENV B=$A", "Dockerfile", {})
    over = await builder.build(node, what, "over", Context(folder.path))
    assert over.config.env["B"] == "one two"
    assert await folder.sh("cat /srv/app/base", image="over") == "/srv/app\n"


async def many_ids(node: Node) -> bool:
    box = (await node.create(SandboxSpec())).id
    try:
        return (await node.run(box, Run(argv=("true",), user=1))).ok
    except Exception:
        return False
    finally:
        await node.destroy(box)


async def test_a_build_without_a_command_is_its_base_and_its_config(folder: Folder) -> None:
    made = await folder.build('ENV A=b\nCMD ["x"]')
    assert (made.kind, made.config.cmd) == ("built", ("x",))
    assert await folder.sh("echo $A") == "b\n"
    assert await folder.build('ENV A=b\nCMD ["x"]') == made


async def test_a_command_that_fails_leaves_the_steps_before_it(folder: Folder, node: Node) -> None:
    text = "RUN echo fine\nRUN seq 100; \\\n  echo broken >&2; exit 3\nRUN never\n"
    with pytest.raises(BuildFailed) as caught:
        await folder.build(text)
    said = caught.value.message
    assert said.startswith(
        "Dockerfile:3: `seq 100;   echo broken >&2; exit 3` exited with 3; the end of what it wrote:\n"
    )
    assert said.endswith("99\n100\nbroken")
    assert "\n81\n" not in said
    assert "--network host" in (caught.value.hint or "")
    assert await node.list() == await node.images() == []
    with pytest.raises(BuildFailed, match="Dockerfile:3"):
        await folder.build(text)
    assert folder.cached == [True]
    with pytest.raises(BuildFailed, match=r"Dockerfile:2: `sleep 60` was killed after 0\.2 s"):
        await folder.build("RUN sleep 60", timeout=0.2)


async def test_a_build_that_is_given_up_leaves_nothing(folder: Folder, node: Node, tmp_path: Path) -> None:
    stored = tmp_path / "state/images"
    for number in range(12):
        building = asyncio.ensure_future(folder.build(f"RUN echo {number} > /f\nRUN sleep 60"))
        await asyncio.sleep(number * 0.02)
        building.cancel()
        await asyncio.wait((building,))
        assert building.cancelled()
        assert await node.list() == []
    running = asyncio.ensure_future(folder.build("RUN echo x > /f\nRUN sleep 60"))
    async with asyncio.timeout(20):
        while len(folder.told) < 3:  # noqa: ASYNC110  (the second one has begun)
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait((running,))
    assert await node.list() == await node.images() == []
    await node.driver.prune()
    named = {layer for path in stored.glob("*.json") for layer in layers.Layers(stored).find(path.stem).layers}
    assert {path.name for path in (stored / "layers").iterdir() if path.is_dir()} == named


ASK = "exec 3<>/dev/tcp/127.0.0.1/{} && head -n1 <&3"


@pytest.fixture
def port() -> Any:
    """Of a listener of this host that says hello."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"hello\n")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


async def test_commands_have_a_network_only_by_the_option(folder: Folder, port: int) -> None:
    text = f'SHELL ["bash", "-c"]\nRUN {ASK.format(port)} > /said\n'
    with pytest.raises(BuildFailed, match="Connection refused"):
        await folder.build(text)
    await folder.build(text, network="host")
    assert await folder.sh("cat /said") == "hello\n"
    assert await folder.sh(f"bash -c '{ASK.format(port)}' || echo none") == "none\n"
    assert await folder.sh("test -d /sys/class && stat -c %s /etc/resolv.conf") == "0\n"


async def test_copy_puts_files_where_it_does_elsewhere(folder: Folder, node: Node) -> None:
    text = (
        "WORKDIR /w\nCOPY src /all\nCOPY src/b a new/\nCOPY a renamed\nCOPY a .\nCOPY a /tmp\n"
        "COPY --chmod=700 src/b sub/x\nCOPY . whole\nCOPY src/link /linked\nCOPY a /w/a\nCOPY src/b /w/a\nCOPY a ..\n"
    )
    if await many_ids(node):
        text += "COPY --chown=nobody a /his/\n"
    await folder.build(text)
    assert await folder.sh("find /all -printf '%P %y %m %l\\n' | sort") == (
        " d 755 \nb f 644 \ndeep d 755 \ndeep/c f 644 \nlink l 777 deep/c\n"
    )
    assert await folder.sh("ls new; cat /a renamed /tmp/a; stat -c %a:%u sub/x; ls whole; cat /linked; cat a") == (
        "a\nb\na\na\na\n700:0\na\nsrc\nc\nb\n"
    )
    if await many_ids(node):
        assert await folder.sh("stat -c %U /his /his/a") == "nobody\nnobody\n"


async def test_a_link_to_a_directory_is_a_place_and_stays(folder: Folder) -> None:
    links = "RUN mkdir -p /real/in && ln -s real /alias && ln -s in /real/link\n"
    await folder.build(f"{links}COPY a /alias\nCOPY src/b /real/link\nCOPY src/b /alias/")
    assert await folder.sh("readlink /alias /real/link; find /real | sort") == (
        "real\nin\n/real\n/real/a\n/real/b\n/real/in\n/real/in/b\n/real/link\n"
    )
    with pytest.raises(Conflict, match="Dockerfile:3: there is a directory at /b/a, where a file is to be"):
        await folder.build("RUN mkdir -p /b/c && ln -s c /b/a\nCOPY . /b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("COPY none /x", "Dockerfile:2: there is no `none`"),
        ("COPY ../x /x", "Dockerfile:2: ../x leads out of"),
        ("COPY a /usr/x", "Dockerfile:2: could not write /usr/x: read-only file system"),
        ("ADD packed /x", "Dockerfile:2: ADD does not unpack packed"),
        ("COPY a [z-a] /x/", "Dockerfile:2: `[z-a]` is no pattern"),
        ("COPY a /etc/passwd/x", "Dockerfile:2: there is a file where a directory is to be"),
        ("WORKDIR /etc/passwd", "Dockerfile:2: there is a file where a directory is to be"),
        ("USER stranger", "Dockerfile:2: there is no user 'stranger' in the image"),
        ("USER 7:8", "Dockerfile:2: user 7 with the group 8"),
        ("USER 70000", "Dockerfile:2: there is no user '70000'"),
    ],
)
async def test_an_error_inside_a_step_says_which_line(folder: Folder, node: Node, text: str, said: str) -> None:
    (folder.path / "packed").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises((InvalidRequest, NotFound, Conflict)) as caught:
        await folder.build(text)
    assert caught.value.message.startswith(said)
    assert await node.list() == []


async def test_a_name_is_taken_over_from_a_built_image_only(folder: Folder, node: Node) -> None:
    await folder.build("RUN echo one > /f")
    old = (await node.create(SandboxSpec(image="made"))).id
    await folder.build("RUN echo two > /f")
    assert await folder.sh("cat /f") == "two\n"
    assert (await node.run(old, Run(argv=("cat", "/f")))).stdout == "one\n"
    await node.snapshot(old, "mine")
    with pytest.raises(Conflict, match="was not built"):
        await folder.build("RUN echo three > /f", name="mine")
    for name in ("host", "fork-1", "step-1", "Big"):
        with pytest.raises(InvalidRequest, match="cannot be the name"):
            await node.tag_image("made", name)


async def test_steps_are_hidden_and_stay(folder: Folder, node: Node, tmp_path: Path) -> None:
    await folder.build(TEXT)
    assert [image.name for image in await node.images()] == ["made"]
    with pytest.raises(NotFound) as caught:
        await node.create(SandboxSpec(image="none"))
    assert "step-" not in (caught.value.hint or "")
    await node.delete_image("made")
    await node.close()
    async with local_node(tmp_path / "state") as later:
        await later.driver.prune()
        folder.node = later
        await folder.build(TEXT)
        assert folder.cached == [True, True, True]


async def over(folder: Folder, base: str, text: str = "RUN true") -> ImageInfo:
    what = dockerfile.parse(f"# a comment\nFROM {base}\n{text}", "Dockerfile", {})
    return await builder.build(folder.node, what, "made", Context(folder.path))


@pytest.mark.parametrize("done", [1, 2])
async def test_a_build_whose_steps_are_pruned_is_finished(folder: Folder, tmp_path: Path, done: int) -> None:
    stored = tmp_path / "state/images"
    pruned: list[str] = []

    def prune(progress: Progress) -> None:
        """As another node of the same store does it, once that many steps are done: before the next, or the name."""
        if progress.number == done and progress.seconds is not None and not pruned:
            for path in stored.glob("step-*.json"):
                pruned.append(path.stem)
                path.unlink()

    what = dockerfile.parse("FROM host\nRUN echo one > /one\nCOPY a /a", "Dockerfile", {})
    await builder.build(folder.node, what, "made", Context(folder.path), told=prune)
    assert len(pruned) == done
    assert await folder.sh("cat /one /a") == "one\na\n"


async def test_a_base_that_is_replaced_meanwhile_is_the_new_one(folder: Folder, node: Node, tmp_path: Path) -> None:
    for name in ("one", "two"):
        await folder.build(f"RUN echo {name} > /who", name=name)
    await node.tag_image("one", "moving")
    store = layers.Layers(tmp_path / "state/images")
    names = ["two"]
    cached: list[bool] = []

    def move(progress: Progress) -> None:
        """Another node does it when the base was looked at and no box stands on it yet."""
        if progress.seconds is not None:
            cached.append(progress.cached)
        elif names:
            found = store.find(names.pop())
            store.name(found.info.model_copy(update={"name": "moving"}), found.layers, replace=True)

    what = dockerfile.parse("FROM moving\nRUN cat /who > /saw", "Dockerfile", {})
    await builder.build(node, what, "made", Context(folder.path), told=move)
    assert await folder.sh("cat /who /saw") == "two\ntwo\n"
    await builder.build(node, what, "made", Context(folder.path), told=move)
    assert cached == [False, True]  # it has the name of what it stands on
    names = ["two", "one"] * 9
    what = dockerfile.parse("FROM moving\nRUN true", "Dockerfile", {})
    with pytest.raises(Conflict, match="made is built on was deleted or replaced while it was built, 5 times"):
        await builder.build(node, what, "made", Context(folder.path), told=move)
    assert await node.list() == []


async def test_an_error_of_the_base_says_which_line(folder: Folder, node: Node) -> None:
    with pytest.raises(NotFound, match=r"^Dockerfile:2: there is no image 'nowhere'") as caught:
        await over(folder, "nowhere")
    assert "`nowhere:latest`" in (caught.value.hint or "")
    with pytest.raises(InvalidRequest, match=r"^Dockerfile:2: 'Debian:12'"):
        await over(folder, "Debian:12")
    with pytest.raises(
        Unsupported, match=f"^Dockerfile:2: a build cannot start from a directory, {folder.path}"
    ) as why:
        await over(folder, str(folder.path))
    assert f"`sandlot image import NAME {folder.path}`" in (why.value.hint or "")
    assert await node.list() == []


async def test_what_an_image_says_of_builds_counts(folder: Folder, node: Node, tmp_path: Path) -> None:
    config = {"Shell": ["/bin/bash", "-ec"], "OnBuild": ["COPY . /app", "RUN make"]}
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in (
            ("layer.tar", bytes(1024)),
            ("config.json", json.dumps({"config": config, "rootfs": {"diff_ids": [EMPTY]}}).encode()),
            ("manifest.json", json.dumps([{"Config": "config.json", "Layers": ["layer.tar"]}]).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    await node.import_image("asking", path)
    with pytest.raises(Unsupported, match=r"^Dockerfile:2: asking asks .*: ONBUILD COPY . /app; ONBUILD RUN make$"):
        await over(folder, "asking")
    found = (await node.image("asking")).config
    await folder.build("RUN true")
    await node.tag_image("made", "bash", found.model_copy(update={"on_build": ()}))
    made = await over(folder, "bash", "RUN [[ a == a ]] && echo $BASH > /shell\nCMD x")
    assert await folder.sh("cat /shell") == "/bin/bash\n"
    assert (made.config.shell, made.config.cmd) == (("/bin/bash", "-ec"), ("/bin/bash", "-ec", "x"))
    made = await over(folder, "bash", 'SHELL ["/bin/sh", "-c"]\nCMD y')
    assert (made.config.shell, made.config.cmd) == (("/bin/sh", "-c"), ("/bin/sh", "-c", "y"))


# Of a tar without entries.
EMPTY = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


async def test_a_user_of_another_group_is_refused(folder: Folder, node: Node) -> None:
    entry = "RUN echo app:x:1000:7::/home/app:/bin/sh >> /etc/passwd\n"
    for user in ("app", "1000"):
        with pytest.raises(InvalidRequest, match=f"Dockerfile:3: user {user} has the group 7 in /etc/passwd") as caught:
            await folder.build(f"{entry}USER {user}")
        assert f"`{user}:1000`" in (caught.value.hint or "")
    with pytest.raises(InvalidRequest, match="Dockerfile:3: user app has the group 7"):
        await folder.build(f"{entry}COPY --chown=app a /his")
    made = await folder.build(f"{entry}USER app:1000")
    assert (made.config.user, made.config.home) == (1000, "/home/app")
    if await many_ids(node):
        await folder.build(f"{entry}COPY --chown=1000 a /his")
        assert await folder.sh("stat -c %u:%g /his") == "1000:1000\n"


async def test_a_step_may_write_more_than_fits_in_memory_by_default(folder: Folder, node: Node) -> None:
    lines = {line.name: line.state for line in await node.capabilities()}
    more = {} if lines["disk beyond memory"] == "kept" else {"limits": {"disk": "3G"}}
    await folder.build("RUN truncate -s 2100M /f && df -k / | tail -n1 | awk '{print $2}' > /size", **more)
    assert int(await folder.sh("cat /size")) > 2_900_000
