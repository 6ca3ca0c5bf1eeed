#!/bin/bash
# The guest's first process: mounts what a host has, runs the tests as whom the kernel's command line says, leaves what
# came out on the second disk, turns the machine off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/sandlot/src:/packages
mount --make-rshared / # as systemd has it
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts -o gid=5,mode=620,ptmxmode=666
mount -t tmpfs shm /dev/shm -o mode=1777
mount -t tmpfs run /run -o mode=755
mount -t tmpfs results /results -o mode=1777
ip link set lo up
ulimit -Hn 1048576 # as systemd has it
hostname guest
for word in $(cat /proc/cmdline); do
    case $word in sandlot.*) declare "${word#sandlot.}" ;; esac
done

groups=/sys/fs/cgroup
v1() { # POINT...: the controllers of version 1, each in a place of its own
    mount -t tmpfs cgroup $groups
    for name in memory pids cpu; do
        mkdir $groups/$name
        mount -t cgroup -o $name cgroup $groups/$name
    done
}
case $cgroups in
    v2) mount -t cgroup2 -o nsdelegate cgroup2 $groups ;;
    v1) v1 ;;
    hybrid)
        v1
        mkdir $groups/unified
        mount -t cgroup2 -o nsdelegate cgroup2 $groups/unified
        ;;
    delegated) # as systemd's Delegate=yes does it
        mount -t cgroup2 -o nsdelegate cgroup2 $groups
        echo "+memory +pids +cpu" > $groups/cgroup.subtree_control
        mkdir $groups/user.d
        chown user $groups/user.d $groups/user.d/cgroup.{procs,threads,subtree_control}
        ;;
esac
if [ "$subids" = on ]; then
    echo user:200000:65536 | tee /etc/subuid > /etc/subgid
else
    rm -f /usr/bin/newuidmap /usr/bin/newgidmap
    : > /etc/subuid
    : > /etc/subgid
fi
[ "$userns" = off ] && echo 0 > /proc/sys/user/max_user_namespaces

as() { # SECONDS WORD...: as the guest's user, in its cgroup, and nothing of ours with it
    local place=/proc/self/mounts ids=()
    [ "$cgroups" = delegated ] && place=$groups/user.d/cgroup.procs
    [ "$user" = user ] && ids=(setpriv --reuid user --regid user --init-groups env HOME=/home/user USER=user)
    # shellcheck disable=SC2016
    timeout --signal=INT --kill-after=30 "$1" bash -c 'echo $$ 2>/dev/null > "$0"; exec "$@"' "$place" "${ids[@]}" "${@:2}"
}
cd /sandlot || exit
export SANDLOT_HOSTILE_ROWS=/results/attacks.json SANDLOT_REFUSED=$refused
as 60 python3 tests/kernels/look.py > /results/promises.json
words=()
[ "$controls" = off ] && words=(-m "not control")
as "$seconds" python3 -m pytest "${words[@]}" -p no:cacheprovider --tb=short --color=no --durations=15 -q ${tests//,/ } 2>&1 |
    tee /results/pytest.txt
echo "${PIPESTATUS[0]}" > /results/status
tar -cf /dev/vdb -C /results .
echo "sandlot-guest: status $(cat /results/status)"
echo s > /proc/sysrq-trigger
echo o > /proc/sysrq-trigger
sleep 60
