"""Rollout: tasks in, batches of finished attempts out.

No loop runs here; each part is called and returns, and only episodes are tasks of their own. Who waits for what, and
what unblocks it:

                 next()              run(task, member)                add(group)            batch()
    Source ◀──────────── Dispatcher ───────────────────▶ BoxRunner                Sink ◀──────────── rl/loop.py
                            │  ▲  ▲                          │ Episode             │ ▲                   │
                            │  │  └──────────────────────────┘                     │ └── waits: enough fresh groups
                            │  └── vacated(): groups were swept ───────────────────┤                     │
                            └────── whole groups ──────────────────────────────────┘ ◀── advance(version)┘
                                                                                     (dispatcher too)

    waits                       for                                         unblocked by
    an episode (its own task)   box, files, agent, grade: each a deadline   that phase; the agent by its answers
    the dispatcher (no task)    room (room.py)                              an episode's end, vacated(), advance()
    loop in Sink.batch()        batch_groups fresh groups                   add(); fail(); its patience

The dispatcher admits and each episode comes out once; its early cancel only saves work. The guarantee that nothing too
old is learned from is the sink's sweep at the moment a batch is cut.
"""
