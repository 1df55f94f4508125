#!/usr/bin/env bash
# What a reboot and a power cut leave: pool, datasets, mounts, and what was written with a sync.
# shellcheck source=tests/guest/case.sh
source /share/case.sh

mounted() { findmnt -n -o FSTYPE,SOURCE /mnt/boots; }

case $GUEST_MARK in
    '')
        zfs destroy -r tank/boots 2>/dev/null || true
        zfs create -o mountpoint=/mnt/boots tank/boots
        zfs create tank/boots/below
        zfs snapshot tank/boots@before
        echo before >/mnt/boots/file
        cat /proc/sys/kernel/random/boot_id >/root/boot-before
        reboot 'the reboot'
        ;;
    'the reboot')
        check "it is another boot" test "$(</root/boot-before)" != "$(</proc/sys/kernel/random/boot_id)"
        same "the pool is there" ONLINE "$(zpool list -H -o health tank)"
        same "the dataset is mounted again" 'zfs tank/boots' "$(mounted | tr -s ' ')"
        same "the one below it too" yes "$(zfs get -H -o value mounted tank/boots/below)"
        same "with what was in it" before "$(</mnt/boots/file)"
        check "its snapshot is there" zfs list tank/boots@before >/dev/null
        check "Incus answers, and has its pool" incus storage show kiln >/dev/null
        figure "boot in good order" "$((GUEST_BOOT_MS / 1000))" s
        echo synced >/mnt/boots/synced
        sync
        power_cut 'the power cut'
        ;;
    'the power cut')
        same "the pool is there after a power cut" ONLINE "$(zpool list -H -o health tank)"
        same "the dataset is mounted" 'zfs tank/boots' "$(mounted | tr -s ' ')"
        same "what was synced is there" synced "$(</mnt/boots/synced)"
        check "the pool has no error" grep -q 'No known data errors' <(zpool status tank)
        figure "boot after a power cut" "$((GUEST_BOOT_MS / 1000))" s
        zfs destroy -r tank/boots
        ;;
esac
