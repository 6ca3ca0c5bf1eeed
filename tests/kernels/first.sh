#!/bin/sh
# The first process of the initial RAM disk: loads what the kernel needs to find its root, and goes there.
mount -t proc proc /proc
mount -t devtmpfs dev /dev
while read -r module; do
    words=
    for word in $(cat /proc/cmdline); do
        case $word in "$module".*) words="$words ${word#"$module".}" ;; esac
    done
    # shellcheck disable=SC2086
    insmod "/modules/$module.ko" $words
done < /modules/order
mount -t ext4 /dev/vda /root
# Taken along, as every distribution does: a /proc left behind below the new root would count as one that is seen.
mount --move /dev /root/dev
mount --move /proc /root/proc
exec switch_root /root /sbin/sandlot-guest
