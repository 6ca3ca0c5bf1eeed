"""Which episodes run: admits them while there is room, and lets each come out exactly once.

Owns the groups that are under way and the count of endings; `admitted == sum(counts) + running` holds after every step
and is asserted. It never looks into an episode, never keeps a deadline (the runner's) and never decides what is too old
to learn from (the sink's sweep does; the cancel in `advance` only saves work). It has no loop: an episode's end, the
sink's word that places are free, and a new version each make it look at its room again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sandlot.errors import DeadlineExceeded, TrainingFault
from sandlot.rl.rollout import room
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.rollout.source import Source
from sandlot.rl.types import Episode, EpisodeEnding, Group, PolicyVersion, Task

RunEpisode = Callable[[Task, int], Awaitable[Episode]]

# A failure is the infrastructure's: once may be chance. A member that fails this often is left out of its group.
ATTEMPTS = 2
# So many failures without one success between them is not chance any more, and the run must say so.
FAILURES_IN_A_ROW = 16
# For episodes that are cancelled: above the runner's own deadline for taking a box down.
STOP_SECONDS = 120.0


@dataclass(slots=True, eq=False)
class Open:
    """A group under way: members still to start, and what came out so far."""

    task: Task
    version: PolicyVersion  # when it started: nothing of it can be older
    waiting: deque[int]
    running: int = 0
    failures: dict[int, int] = field(default_factory=dict)
    finished: list[Episode] = field(default_factory=list)
    stale: bool = False


class Dispatcher:
    """Feeds `sink` with groups of `group_size` attempts. `on_episode` is called with each episode as it comes out."""

    def __init__(
        self,
        source: Source,
        run_episode: RunEpisode,
        sink: Sink,
        *,
        group_size: int,
        batch_groups: int,
        max_running: int,
        max_staleness: float,
        version: PolicyVersion = 0,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        self._source = source
        self._run_episode = run_episode
        self._sink = sink
        self._group_size = group_size
        self._batch_groups = batch_groups
        self._max_running = max_running
        self._max_staleness = max_staleness
        self._first_version = version
        self._version = version
        self._on_episode = on_episode or (lambda episode: None)
        self._again: deque[Task] = deque()  # from a checkpoint: groups that were under way
        self._open: list[Open] = []
        self._tasks: dict[asyncio.Task[None], Open] = {}
        self._reasons: dict[asyncio.Task[None], EpisodeEnding] = {}
        self._stopped = True
        self._failures_in_a_row = 0
        self.counts: dict[EpisodeEnding, int] = dict.fromkeys(EpisodeEnding, 0)
        self.groups = {"started": 0, "handed_on": 0, "short": 0, "stale": 0, "surplus": 0}
        self.admitted = 0

    @property
    def running(self) -> int:
        """Episodes that have been admitted and have not come out."""
        return len(self._tasks)

    def start(self) -> None:
        """Begin to admit."""
        self._stopped = False
        self._sink.on_vacated(self._admit)
        self._admit()

    def advance(self, version: PolicyVersion) -> None:
        """The policy is `version` now. Groups that are too old for it already are cancelled."""
        self._version = version
        for group in self._open:
            group.stale = group.stale or room.too_old(group.version, version, self._max_staleness)
            if group.stale:
                group.waiting.clear()
        self._cancel([task for task, group in self._tasks.items() if group.stale], EpisodeEnding.CANCELLED_STALE)
        self._settle()
        self._admit()

    async def stop(self) -> None:
        """Admit nothing more, and end what runs as surplus. Idempotent; returns when every episode has come out."""
        self._stopped = True
        for group in self._open:
            group.waiting.clear()
        await asyncio.sleep(0)  # a task that is cancelled before its first step would open nothing and close nothing
        running = list(self._tasks)
        self._cancel(running, EpisodeEnding.CANCELLED_SURPLUS)
        if running:
            late = (await asyncio.wait(running, timeout=STOP_SECONDS))[1]
            if late:
                raise DeadlineExceeded(f"{len(late)} episodes did not end within {STOP_SECONDS:g} s of being cancelled")
        self._settle()
        self._check()

    def state(self) -> dict[str, Any]:
        """The source's cursor and the tasks that are under way: they start again from the beginning, by seed."""
        underway = [(group.task.id, group.task.seed, group.task.data) for group in self._open]
        waiting = [(task.id, task.seed, task.data) for task in self._again]
        return {"source": self._source.state(), "underway": [*underway, *waiting]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; call it before `start`."""
        self._source.restore(state["source"])
        self._again = deque(Task(*fields) for fields in state["underway"])

    def _admit(self) -> None:
        if self._stopped:
            return
        while room.episodes(self.running, max_running=self._max_running):
            # Groups under way come first, the oldest before all: a batch waits for whole groups.
            group = next((group for group in self._open if group.waiting), None) or self._begin()
            if group is None:
                break
            self._launch(group, group.waiting.popleft())
        self._check()

    def _begin(self) -> Open | None:
        """A new group; None when there is no room for one."""
        made, held, underway = self._version - self._first_version, self._sink.held, len(self._open)
        if not room.groups(made, held, underway, batch=self._batch_groups, max_staleness=self._max_staleness):
            return None
        task = self._again.popleft() if self._again else self._source.next()
        group = Open(task, self._version, deque(range(self._group_size)))
        self._open.append(group)
        self.groups["started"] += 1
        return group

    def _launch(self, group: Open, member: int) -> None:
        self.admitted += 1
        group.running += 1
        task = asyncio.ensure_future(self._attempt(group, member))
        self._tasks[task] = group

    async def _attempt(self, group: Open, member: int) -> None:
        """One episode from its start to its ending; the top of its task, so whatever goes wrong is recorded here."""
        this = asyncio.current_task()
        assert this is not None
        try:
            episode = await self._run_episode(group.task, member)
        except asyncio.CancelledError:
            ending = self._reasons.pop(this, EpisodeEnding.CANCELLED_SURPLUS)
            episode = Episode(f"{group.task.id}.{member}", group.task, member, ending)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            episode = Episode(f"{group.task.id}.{member}", group.task, member, EpisodeEnding.FAILED, detail=detail)
        self._reasons.pop(this, None)
        del self._tasks[this]
        self.counts[episode.ending] += 1
        group.running -= 1
        try:
            self._came_out(group, member, episode)
            self._settle()
            self._admit()
        except Exception as error:  # a scorer or a report that breaks: the run must hear of it
            self._stopped = True
            self._sink.fail(error)

    def _came_out(self, group: Open, member: int, episode: Episode) -> None:
        if episode.ending is EpisodeEnding.OK:
            self._failures_in_a_row = 0
            group.finished.append(episode)
        elif episode.ending is EpisodeEnding.FAILED:
            self._failures_in_a_row += 1
            group.failures[member] = group.failures.get(member, 0) + 1
            if group.failures[member] < ATTEMPTS and not (group.stale or self._stopped):
                group.waiting.append(member)
        self._on_episode(episode)
        if self._failures_in_a_row >= FAILURES_IN_A_ROW and not self._stopped:
            self._stopped = True
            lost = f"{self._failures_in_a_row} episodes failed one after another; the last: {episode.detail}"
            self._sink.fail(TrainingFault(lost, "`sandlot doctor` says what this host can do"))

    def _settle(self) -> None:
        """Let go of groups of which nothing is left to run: whole ones go to the sink, the others are counted."""
        over = [group for group in self._open if not group.running and not group.waiting]
        if not over:
            return
        self._open = [group for group in self._open if group.running or group.waiting]
        for group in over:
            if group.stale:
                self.groups["stale"] += 1
            elif self._stopped and len(group.finished) < self._group_size:
                self.groups["surplus"] += 1  # cut short by the end of the run: comparing its remains would be unfair
            elif len(group.finished) < min(2, self._group_size):
                self.groups["short"] += 1  # nothing to compare with
            else:
                self.groups["handed_on"] += 1
                group.finished.sort(key=lambda episode: episode.member)
                self._sink.add(Group(group.task, group.finished))

    def _cancel(self, tasks: list[asyncio.Task[None]], reason: EpisodeEnding) -> None:
        for task in tasks:
            if task not in self._reasons:
                self._reasons[task] = reason
                task.cancel()

    def _check(self) -> None:
        assert self.admitted == sum(self.counts.values()) + self.running, (self.admitted, self.counts, self.running)
        closed = sum(count for name, count in self.groups.items() if name != "started")
        assert self.groups["started"] == closed + len(self._open), (self.groups, len(self._open))


async def rollout_all(
    tasks: list[Task],
    run_episode: RunEpisode,
    max_running: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """One attempt at each task, at most `max_running` at a time: the episodes in the order of the tasks, failed ones
    included. Raises TrainingFault when they fail one after another. If it is cancelled, so is what runs."""
    episodes: dict[int, Episode] = {}
    todo = iter(enumerate(tasks))
    came_out = on_episode or (lambda episode: None)
    failures = 0

    async def work() -> None:
        nonlocal failures
        for place, task in todo:
            try:
                episode = episodes[place] = await run_episode(task, 0)
            except asyncio.CancelledError:
                came_out(Episode(f"{task.id}.0", task, 0, EpisodeEnding.CANCELLED_SURPLUS))
                raise
            came_out(episode)
            failures = failures + 1 if episode.ending is EpisodeEnding.FAILED else 0
            if failures >= FAILURES_IN_A_ROW:
                lost = f"{failures} episodes failed one after another; the last: {episode.detail}"
                raise TrainingFault(lost, "`sandlot doctor` says what this host can do")

    workers = [asyncio.ensure_future(work()) for _ in range(min(max_running, len(tasks)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [episodes[place] for place in range(len(tasks))]
