#!/usr/bin/env bash
# Caches on ZFS with Incus under systemd: snapshots, forks, a way back, walls; and a reboot in the middle of it, after which state and
# caches are as before. GUEST_BIN is `kiln`, `kilnd`, `kiln-init`, `buildkitd`, `buildctl`, `buildx`, `busybox`, the repository's
# `scripts`, `tests` and `examples`, and `cache`, where an image's base may lie; where there is none, nothing is looked at.
# shellcheck disable=SC2034,SC2154  # what the libraries read and set
# shellcheck source=tests/guest/case.sh
source /share/case.sh

if [[ ! -x $GUEST_BIN/kilnd || ! -x $GUEST_BIN/buildx || ! -d $GUEST_BIN/tests ]]; then
    skip "there is no kilnd, no buildx or no tests in $GUEST_BIN"
    exit 0
fi

export KILN_ROOT=$GUEST_BIN KILN_BIN=$GUEST_BIN BUILDKIT_BIN=$GUEST_BIN KILN_INIT=$GUEST_BIN/kiln-init KILN_INCUS=/var/lib/incus
export XDG_CACHE_HOME=$GUEST_BIN/cache KILN_DATASET=tank/kiln HOME=/root
export KILN_RANGE=93 KILN_TABLE=kiln-caches
home=/var/lib/kiln-60
PLACE=$home/place
runtime=incus
for file in scripts/lib/common.sh scripts/lib/place.sh scripts/lib/incus.sh scripts/lib/build.sh scripts/lib/kilnd.sh tests/acceptance/points.sh \
    tests/acceptance/heart-points.sh tests/acceptance/caches-points.sh tests/acceptance/forks-points.sh; do
    # shellcheck disable=SC1090
    source "$GUEST_BIN/$file"
done
repo=example.com/guest/caches

no_forks() { [[ $(kiln ps --json | jq length) -eq 1 ]]; }

# What has to outlive a boot, in words.
as_it_is() {
    verdicts "$key"
    kiln show "$key" --json | jq -r '.settings.tier.value // .settings.tier, .repo, .address'
    kiln trash ls --json | jq -r '.[].name'
    zfs list -H -r -o name -t all "$KILN_DATASET" | grep -v "/live/f"
}

case $GUEST_MARK in
    '')
        # The points of the acceptance, as they are.
        if KILN_DEMO_DIR=/var/tmp bash "$GUEST_BIN/tests/acceptance/caches" --short --runtime incus --engine zfs --dataset tank/kiln-acceptance \
            history damage refused fork pulls walls >/run/caches 2>&1; then :; fi
        grep -E '^(ok|skipped:) ' /run/caches | sed "s/^ok /ok $GUEST_CASE: /" >&3 || true
        grep -E '^not ok ' /run/caches | sort -u | sed "s/^not ok /FAILED $GUEST_CASE: /" >&3 || true
        grep -E '^[a-z]+ \(incus\): .*: ' /run/caches | sed "s/^/$GUEST_CASE: /" >&3 || true
        grep -q '^[0-9]* passed, [0-9]* failed$' /run/caches || { failed "the acceptance came to its end"; tail -n 30 /run/caches >&3; }

        rm -rf "$home"
        zfs destroy -R "$KILN_DATASET" 2>/dev/null || true
        mkdir -p "$PLACE/busybox"
        cp "$GUEST_BIN/busybox" "$PLACE/busybox/"
        private_incus
        kilnd_config "$home/kiln.toml" incus
        kilnd_start "$home/kiln.toml"
        hello one "$repo" --build-arg ROUND=one
        same "a build" 0 "$hello_status"
        key=$(kiln key --repo "$repo")
        kiln set "$key" --tier hot >/dev/null
        await 30 is_quiet "$key" || true
        kiln cache snapshot "$key" >/dev/null
        check "its snapshot is good" await 300 is_good "$key" "$(newest "$key")"
        KILN_UNTRUSTED=1 KILN_PULL_REQUEST=1 hello fork "$repo"
        same "a build of a fork" 0 "$hello_status"
        await 30 is_quiet "$key" || true
        check "a rollback" kiln cache rollback "$key"
        check "after which the hot project is up again" await 200 is_phase "$key" warm
        as_it_is >"$home/before"
        reboot 'the reboot'
        ;;
    'the reboot')
        rm -rf "${home:?}/run"
        mkdir "$home/run"
        kilnd_start "$home/kiln.toml"
        key=$(kiln key --repo "$repo")
        check "the hot project comes up again" await 200 is_phase "$key" warm
        as_it_is >"$home/after"
        same "state and caches are as before" '' "$(diff "$home/before" "$home/after")"
        hello two "$repo" --build-arg ROUND=one
        same "a build after it" 0 "$hello_status"
        same "finds all in its cache" "$hello_steps" "$hello_cached"
        check "forks go" await 200 no_forks
        same "nothing lost its other half" '[]' "$(kiln orphans --json)"
        kiln set "$key" --tier warm >/dev/null
        kiln rm "$key" >/dev/null || kiln stop --force "$key" >/dev/null || true
        kilnd_stop
        incus list --project kiln -c n -f csv | while read -r name; do incus delete -f --project kiln "$name"; done
        zfs destroy -R "$KILN_DATASET"
        ;;
esac
