"""The native driver: boxes made of Linux namespaces by the static helper `sandlot-init`, with nothing else installed.

`plan.py` decides (pure), `box.py` carries out, `wire.py` talks to the helper, `cgroup.py` limits, `seccomp.py` denies,
`ids.py` hands out host ids, `checks.py` tells what this host allows.
"""
