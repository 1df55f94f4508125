#!/usr/bin/env bash
# The ground that the other cases stand on: each part of it is there and does its work.
# shellcheck source=tests/guest/case.sh
source /share/case.sh

of() { zfs get -H -o value "$1" "$2"; }

# Everything a program may leave of its output, without a pipe that ends early.
has() { [[ $2 == *"$1"* ]]; }

figure boot "$((GUEST_BOOT_MS / 1000))" s
figure kernel "$(uname -r)" "on $(nproc) CPUs"
figure systemd "$(systemctl --version | awk 'NR == 1 { print $2 }')"
figure OpenZFS "$(zfs version | paste -sd ' ')"
figure Incus "$(incus version 2>/dev/null | awk '/^Server/ { print $3 }')"
figure nft "$(nft --version | awk '{ print $2 }')"
figure runc "$(runc --version | awk 'NR == 1 { print $3 }')"

same "systemd is process 1" systemd "$(</proc/1/comm)"
check "the boot left no failed unit" has '0 loaded units' "$(systemctl list-units --state=failed)"
same "cgroups are version 2 only" cgroup2fs "$(stat -f -c %T /sys/fs/cgroup)"
check "pressure figures are there" test -r /proc/pressure/io
check "AppArmor is on" aa-enabled --quiet
same "OpenZFS is 2.3, in the kernel too" '2.3 2.3' \
    "$(zfs version | sed -E 's/^zfs-(kmod-)?([0-9]+\.[0-9]+).*/\2/' | tr '\n' ' ' | sed 's/ $//')"

# AppArmor: a profile in force takes a right away.
cp "$(type -P cat)" /usr/local/bin/confined-cat
echo '#include <tunables/global>
profile confined /usr/local/bin/confined-cat { #include <abstractions/base>
  /usr/local/bin/confined-cat mr, deny /etc/hostname r, /etc/hosts r, }' >/run/confined
check "AppArmor loads a profile" apparmor_parser --replace /run/confined
check "a confined program reads what it may" timeout 20 confined-cat /etc/hosts >/dev/null
if confined-cat /etc/hostname >/dev/null 2>&1; then failed "a confined program is denied the rest"; else ok "a confined program is denied the rest"; fi
apparmor_parser --remove /run/confined
rm -f /usr/local/bin/confined-cat

# ZFS, as the volumes use it.
zfs destroy -r tank/platform 2>/dev/null || true
same "the pool is sound" ONLINE "$(zpool list -H -o health tank)"
check "a dataset is made with a quota" timed "zfs create" zfs create -o refquota=64M -o mountpoint=/mnt/platform tank/platform
same "the quota is in force" 64M "$(of refquota tank/platform)"
same "it is mounted" /mnt/platform "$(findmnt -n -o TARGET -t zfs --source tank/platform)"
if dd if=/dev/urandom of=/mnt/platform/full bs=1M count=80 2>/run/dd; then
    failed "more than the quota is refused"
else
    check "more than the quota is refused" has 'quota exceeded' "$(</run/dd)"
fi
rm -f /mnt/platform/full
echo one >/mnt/platform/file
check "a snapshot is taken" timed "zfs snapshot" zfs snapshot tank/platform@s
echo two >/mnt/platform/file
check "a clone of it is made" timed "zfs clone" zfs clone -o mountpoint=/mnt/platform-fork tank/platform@s tank/platform/fork
same "the clone has what the snapshot had" one "$(</mnt/platform-fork/file)"
check "overlayfs stands on ZFS" bash -c 'mkdir -p /mnt/platform/{l,u,w,m} && mount -t overlay overlay \
    -o lowerdir=/mnt/platform/l,upperdir=/mnt/platform/u,workdir=/mnt/platform/w /mnt/platform/m && echo x >/mnt/platform/m/x && umount /mnt/platform/m'
check "all of it is removed" timed "zfs destroy" zfs destroy -r tank/platform

# nftables, with what Kiln's own table uses.
check "a table of nftables loads" nft -f - <<'NFT'
table inet platform {
    set doors { type ifname; elements = { "kiln1" } }
    chain input {
        type filter hook input priority -5; policy accept;
        ct state established,related accept
        iifname @doors counter drop
    }
    chain onward {
        type filter hook forward priority -5; policy accept;
        iifname "kiln*" reject
    }
    chain outward {
        type nat hook postrouting priority srcnat;
        oifname "none0" masquerade
    }
}
NFT
check "and goes" nft delete table inet platform

# Incus: a container with a root of one program.
check "Incus has its pool on ZFS" has 'source: tank/incus' "$(incus storage show kiln)"
image=$(mktemp -d)
mkdir -p "$image/rootfs/"{bin,sbin,proc,sys,dev,etc,tmp,run}
cp /bin/busybox "$image/rootfs/bin/"
ln -s busybox "$image/rootfs/bin/sh"
printf '#!/bin/sh\nexec /bin/busybox sleep 1000000\n' >"$image/rootfs/sbin/init"
chmod +x "$image/rootfs/sbin/init"
printf 'architecture: x86_64\ncreation_date: 1\n' >"$image/metadata.yaml"
tar -C "$image" -cf "$image.tar" metadata.yaml rootfs
incus image import "$image.tar" --alias platform >/dev/null
zfs create -o mountpoint=/mnt/platform tank/platform
timed "incus init" incus init --quiet platform platform --storage kiln --no-profiles -c security.nesting=true </dev/null 2>/run/init ||
    { cat /run/init; exit 1; }
incus config device add platform cache disk source=/mnt/platform path=/cache shift=true >/dev/null
check "a container starts" timed "incus start" incus start platform
check "it writes to a dataset of the host" incus exec platform -- /bin/busybox sh -c 'echo inside >/cache/file' </dev/null
same "as the host's own root would" 'inside 0' "$(cat /mnt/platform/file) $(stat -c %u /mnt/platform/file)"
same "its root is not the host's" 1000000 "$(incus exec platform -- /bin/busybox cat /proc/self/uid_map </dev/null | awk '{ print $2 }')"
check "it is confined by AppArmor" has incus-platform "$(cat "/proc/$(incus list platform -f csv -c p)/attr/current")"
incus delete --force platform
incus image delete platform
zfs destroy -r tank/platform
rm -rf "$image" "$image.tar"
