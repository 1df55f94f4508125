#!/usr/bin/env bash
# The ZFS engine against the real thing: the volume contract, pools in the states that they get into, and crashes between any two
# commands. GUEST_BIN/kiln-tests is the library's test binary; where there is none, nothing is looked at.
# shellcheck source=tests/guest/case.sh
source /share/case.sh

if [[ ! -x $GUEST_BIN/kiln-tests ]]; then
    skip "there is no $GUEST_BIN/kiln-tests: copy in what cargo test -p kiln --lib --no-run made"
    exit 0
fi

zfs destroy -R tank/engine 2>/dev/null || true
zfs create -o mountpoint=none tank/engine
export KILN_TEST_ZFS=tank/engine

# A test each, so that a result is one and a hang ends with it.
mapfile -t tests < <("$GUEST_BIN/kiln-tests" --list 2>/dev/null | sed -n 's/^\(host::volumes::.*::zfs_[a-z0-9_]*\): test$/\1/p')
same "there are tests of the engine" yes "$([[ ${#tests[@]} -gt 10 ]] && echo yes || echo "${#tests[@]}")"
for test in "${tests[@]}"; do
    if timeout 900 "$GUEST_BIN/kiln-tests" --exact "$test" --nocapture >/run/zfs-test 2>&1; then
        if grep -q '^skipped: ' /run/zfs-test; then failed "$test: $(grep -m1 '^skipped: ' /run/zfs-test)"; else ok "${test##*::}"; fi
        sed -n "s/^figure: /$GUEST_CASE: /p" /run/zfs-test
    else
        failed "${test##*::}"
        tail -n 30 /run/zfs-test
    fi
done
same "nothing is left" tank/engine "$(zfs list -H -r -t all -o name tank/engine)"
same "no pool is left" tank "$(zpool list -H -o name)"
check "the dataset is removed" zfs destroy tank/engine
