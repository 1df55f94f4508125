#!/usr/bin/env bash
# The ZFS engine against the real thing: the volume contract, pools in the states that they get into, and crashes between any two
# commands. GUEST_BIN/kiln-tests is the library's test program; where there is none, nothing is looked at. GUEST_BIN/kiln-tests-libzetta
# is the one with that feature, which speaks to ZFS through its library: in a short run only the contract.
# shellcheck source=tests/guest/case.sh
source /share/case.sh

if [[ ! -x $GUEST_BIN/kiln-tests ]]; then
    skip "there is no $GUEST_BIN/kiln-tests: copy in what cargo test -p kiln --lib --no-run made"
    exit 0
fi

zfs destroy -R tank/engine 2>/dev/null || true
zfs create -o mountpoint=none tank/engine
export KILN_TEST_ZFS=tank/engine

# engine PROGRAM PATTERN LEAST: a test each, so that a result is one and a hang ends with it.
engine() {
    local test tests log=/run/zfs-test name=${1##*/}
    mapfile -t tests < <("$1" --list 2>/dev/null | sed -nE "s/^($2): test\$/\1/p")
    same "$name: there are tests of the engine" yes "$([[ ${#tests[@]} -ge $3 ]] && echo yes || echo "${#tests[@]}")"
    for test in "${tests[@]}"; do
        if timeout 900 "$1" --exact "$test" --nocapture >"$log" 2>&1; then
            if grep -q '^skipped: ' "$log"; then failed "$name: $test: $(grep -m1 '^skipped: ' "$log")"; else ok "$name: ${test##*::}"; fi
            sed -n "s/^figure: /$GUEST_CASE: $name: /p" "$log"
        else
            failed "$name: ${test##*::}"
            tail -n 30 "$log"
        fi
    done
}

all='host::volumes::.*::zfs_[a-z0-9_]*'
timed "the engine by the command" engine "$GUEST_BIN/kiln-tests" "$all" 25
if [[ -x $GUEST_BIN/kiln-tests-libzetta ]]; then
    [[ -z $GUEST_SHORT ]] || all='host::volumes::contract::.*::zfs_[a-z0-9_]*|host::volumes::zfs::tests::zfs_is_spoken_to_through_libzfs_core'
    timed "the engine by its library" engine "$GUEST_BIN/kiln-tests-libzetta" "$all" 3
else
    skip "the engine with feature libzetta: there is no $GUEST_BIN/kiln-tests-libzetta"
fi
same "nothing is left" tank/engine "$(zfs list -H -r -t all -o name tank/engine)"
same "no pool is left" tank "$(zpool list -H -o name)"
check "the dataset is removed" zfs destroy tank/engine
