#!/usr/bin/env bash
# Caches on ZFS with Incus under systemd: the points of tests/acceptance/caches; and a kilnd that is a unit of systemd, with a reboot
# in the middle of it all, after which state and caches are as before. GUEST_BIN is `kiln`, `kilnd`, `kiln-init`, `buildkitd`,
# `buildctl`, `buildx`, `busybox`, and the repository's `scripts`, `tests` and `examples`; where there is none, nothing is looked at.
# GUEST_POINTS are the points of the acceptance, all if it is empty, but in a short run none.
# shellcheck disable=SC2034,SC2154  # what the libraries read and set
# shellcheck source=tests/guest/case.sh
source /share/case.sh

if [[ ! -x $GUEST_BIN/kilnd || ! -x $GUEST_BIN/buildx || ! -d $GUEST_BIN/tests ]]; then
    skip "there is no kilnd, no buildx or no tests in $GUEST_BIN"
    exit 0
fi

home=/var/lib/kiln-60
clear_away() {
    local name
    systemctl --quiet disable --now kilnd-60 2>/dev/null || true
    rm -f /etc/systemd/system/kilnd-60.service
    nft delete table inet kiln-60 2>/dev/null || true
    for name in $(incus list --project kiln -c n -f csv 2>/dev/null || true); do incus delete -f --project kiln "$name"; done
    for name in tank/kiln tank/kiln-acceptance; do
        ! zfs list "$name" >/dev/null 2>&1 || zfs destroy -R "$name"
    done
    rm -rf "$home"
}

if [[ -z $GUEST_MARK ]]; then
    clear_away
    mkdir -p "$home"
fi
export KILN_ROOT=$GUEST_BIN KILN_BIN=$GUEST_BIN BUILDKIT_BIN=$GUEST_BIN KILN_INIT=$GUEST_BIN/kiln-init KILN_INCUS=/var/lib/incus
export KILN_BASE=$home/base.tar KILN_DATASET=tank/kiln XDG_CACHE_HOME=$home/cache HOME=/root
# Where each instruction is emulated everything takes ten times as long, and so may what is waited for.
export KILN_PATIENCE=6
KILN_RANGE=93 KILN_TABLE=kiln-60
PLACE=$home/place
runtime=incus
for file in scripts/lib/common.sh scripts/lib/place.sh scripts/lib/incus.sh scripts/lib/build.sh scripts/lib/kilnd.sh tests/acceptance/points.sh \
    tests/acceptance/heart-points.sh tests/acceptance/caches-points.sh tests/acceptance/forks-points.sh; do
    # shellcheck disable=SC1090
    source "$GUEST_BIN/$file"
done
# They have results, and a reboot, of their own.
source /share/case.sh
point=caches
# What takes the example's steps long is nothing of Kiln's.
HELLO_FLAGS=(--build-arg WORK=1)
repo=example.com/guest/caches
_kilnd_home=$home

# What a daemon calls, and no Debian: an image is unpacked file by file, and each one is emulated.
base_root() {
    local root=$home/rootfs file
    mkdir -p "$root"/{usr/{bin,sbin,lib,lib64,local/bin},proc,sys,dev,tmp,run,root,etc/kiln,var/{tmp,lib/buildkit}}
    ln -s usr/bin usr/sbin usr/lib usr/lib64 "$root/"
    cp -- "$GUEST_BIN/busybox" "$root/usr/bin/"
    ln -s busybox "$root/usr/bin/sh"
    for file in "$(type -P runc)" $(ldd "$(type -P runc)" | grep -o '/[^ ]*'); do
        install -D -- "$(realpath -- "$file")" "$root/$(realpath -s -- "$(dirname -- "$file")")/${file##*/}"
    done
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    tar -C "$home" -cf "$KILN_BASE" rootfs
    rm -rf "$root"
}

answers() { kiln ps >/dev/null 2>&1; }

# Without it nothing of the rest can be.
check_answers() {
    await 10 answers && { ok "$1"; return; }
    failed "$1"
    journalctl -u kilnd-60 -b --no-pager -o cat -n 20
    exit 1
}

# kilnd as an admin would have it.
unit() {
    cat >/etc/systemd/system/kilnd-60.service <<UNIT
[Unit]
Description=Kiln
After=incus.service zfs-mount.service
Wants=incus.service

[Service]
ExecStart=$GUEST_BIN/kilnd --config $home/kiln.toml
Restart=on-failure

[Install]
WantedBy=multi-user.target
UNIT
    sed -i "s,^run_dir = .*,run_dir = \"/run/kiln-60\"," "$home/kiln.toml"
    rm -rf "${home:?}/run"
    ln -s /run/kiln-60 "$home/run"
    systemctl daemon-reload
    systemctl --quiet enable --now kilnd-60
}

as_before() { as_it_is >"$home/after" && cmp -s "$home/before" "$home/after"; }

# What has to outlive a boot, in words.
as_it_is() {
    local of
    for of in "$key" "$asleep" "$fork"; do
        verdicts "$of"
        kiln show "$of" --json | jq -r '.key, .repo, .address, (.settings.tier | .value? // .), .phase'
        leases_of "$of"
    done
    kiln trash ls --json | jq -r '.[].name'
    zfs list -H -r -o name,origin,refquota -t filesystem "$KILN_DATASET"
    zfs list -H -r -o name -t snapshot "$KILN_DATASET"
}

reached() { "$GUEST_BIN/busybox" nc -w 2 "$1" "$2" </dev/null >/dev/null 2>&1; }

fork_reaches() { nsenter --target "$(daemon_of "$fork" | awk '{ print $2 }')" --net "$GUEST_BIN/busybox" nc -w 2 "$1" "$2" </dev/null >/dev/null 2>&1; }

fork_is_kept_from() { ! fork_reaches "$1" "$2"; }

# From the namespace of the fork: its neighbour and this host, which are there for others. `walls` looks at all the rest.
walls_stand() {
    local neighbour listener
    neighbour=$(project "$key" address)
    neighbour=${neighbour%:*}
    "$GUEST_BIN/busybox" httpd -f -p 8180 -h "$GUEST_BIN/examples" </dev/null >/dev/null 2>&1 &
    listener=$!
    check "$1: this host is reached on 8180" await 10 reached 169.254.0.1 8180
    check "$1: not by the fork" fork_is_kept_from 169.254.0.1 8180
    check "$1: the project's daemon is reached" await 10 reached "$neighbour" 8372
    check "$1: not by the fork either" fork_is_kept_from "$neighbour" 8372
    check "$1: the fork has a network" nsenter --target "$(daemon_of "$fork" | awk '{ print $2 }')" --net ip route get 5.5.5.5 >/dev/null
    kill "$listener"
}

# The points of the acceptance, as they are.
acceptance() {
    local points words=(--runtime incus --engine zfs --dataset tank/kiln-acceptance)
    [[ -z $GUEST_SHORT ]] || words+=(--short)
    read -r -a points <<<"${GUEST_POINTS:-history damage refused fork pulls walls spread}"
    KILN_DEMO_DIR=/var/tmp bash "$GUEST_BIN/tests/acceptance/caches" "${words[@]}" "${points[@]}" >/run/caches 2>&1 || true
    cp /run/caches /share/out/caches.log
    grep -E '^(ok|skipped:) ' /run/caches | sed "s/^ok /ok $GUEST_CASE: /" >&3 || true
    # Each is told of a second time, at the end.
    grep -E '^not ok ' /run/caches | sort -u | sed "s/^not ok /FAILED $GUEST_CASE: /" >&3 || true
    grep -E '^([a-z]+ \(incus\): .*: |    \([0-9.]+ s\)|== )' /run/caches | sed "s/^/$GUEST_CASE: /" >&3 || true
    grep -q '^[0-9]* passed, [0-9]* failed$' /run/caches || { failed "the acceptance came to its end"; tail -n 30 /run/caches >&3; }
}

case $GUEST_MARK in
    '')
        timed "the base of the image" base_root
        # Ten starts and more each; on btrfs they run on any machine.
        [[ -n $GUEST_SHORT && -z ${GUEST_POINTS-} ]] || acceptance
        mkdir -p "$PLACE"
        find_busybox
        private_incus
        kilnd_config "$home/kiln.toml" incus
        unit
        check_answers "kilnd answers, started by systemd"
        hello one "$repo" --build-arg ROUND=one
        same "a build" 0 "$hello_status"
        key=$(kiln key --repo "$repo") asleep=$(kiln key --repo "$repo-asleep")
        hello asleep "$repo-asleep"
        same "one of another project" 0 "$hello_status"
        check "its first snapshot is good" await 60 has_good "$asleep"
        kiln set "$key" --tier hot >/dev/null
        check "the other project is stopped" rests "$asleep"
        await 30 is_quiet "$key" || true
        kiln cache snapshot "$key" >/dev/null
        check "its snapshot is good" await 60 is_good "$key" "$(newest "$key")"
        same "the cache's dataset has the size for a quota" 4G "$(zfs get -H -o value refquota "$KILN_DATASET/${home##*/}/live/$key")"
        check "a rollback" kiln cache rollback "$key"
        check "after which the hot project is up again" await 60 is_phase "$key" warm
        KILN_UNTRUSTED=1 KILN_PULL_REQUEST=1 hello fork "$repo" --build-arg ROUND=one
        same "a build of a fork" 0 "$hello_status"
        same "finds all in its cache" "$hello_steps" "$hello_cached"
        asked_fork held "$repo" 1
        same "a lease of the fork" 200 "$asked_status"
        fork=$(answer held .key)
        await 30 is_quiet "$fork" || true
        walls_stand before
        # A hot project and a fork that has a lease are up, another project sleeps, and nothing is brought to rest.
        as_it_is >"$home/before"
        reboot 'the reboot'
        ;;
    'the reboot')
        check_answers "kilnd answers, started by the boot"
        key=$(kiln key --repo "$repo") asleep=$(kiln key --repo "$repo-asleep") fork=$(answer held .key)
        check "the hot project comes up again" await 60 is_phase "$key" warm
        check "so does the fork that has a lease" await 60 is_phase "$fork" warm
        walls_stand after
        # A first start in the rush of a boot may take a second try.
        await 60 as_before || true
        same "state and caches are as before" '' "$(diff "$home/before" "$home/after" | tr '\n' ';')"
        kiln events --key "$fork" | tail -n 12 | cut -c1-240
        hello two "$repo" --build-arg ROUND=one
        same "a build after it" 0 "$hello_status"
        same "finds all in its cache" "$hello_steps" "$hello_cached"
        figure "that build" "$hello_ms" ms
        hello woken "$repo-asleep"
        same "a build of what slept" 0 "$hello_status"
        same "finds all in its cache too" "$hello_steps" "$hello_cached"
        KILN_UNTRUSTED=1 KILN_PULL_REQUEST=1 hello fork-two "$repo" --build-arg ROUND=one
        same "a build of the fork" 0 "$hello_status"
        same "finds all in its copy" "$hello_steps" "$hello_cached"
        give_back held
        same "nothing lost its other half" '[]' "$(kiln orphans --json)"
        journalctl -u kilnd-60 -b --no-pager -o cat | grep -E ' (ERROR|WARN) ' | cut -c1-300 || true
        check "all of it goes" clear_away
        ;;
esac
