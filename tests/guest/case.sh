# shellcheck shell=bash
# In the guest: what a case is written with. A case is a script in tests/guest/cases that begins with `source /share/case.sh`.
#
#   check TEXT WORD...     the command succeeds
#   same TEXT WANTED SEEN  two texts are equal
#   ok TEXT, failed TEXT   a result
#   figure NAME VALUE [UNIT]
#                          a figure
#   skip TEXT              what is not looked at, and why
#   reboot MARK            ends the case; after a reboot in good order it is run again from its top, with GUEST_MARK=MARK
#   power_cut MARK         the same with a power cut at this moment: what was not yet written to a disk is lost
#
# Set: GUEST_CASE, its name; GUEST_MARK, empty at first; GUEST_SHORT, not empty in a short run; GUEST_BIN, where the artefacts
# are; GUEST_BOOT_MS, how long this boot took, as the host saw it.

set -euo pipefail

# Results go here whatever becomes of the output of a command that is looked at.
exec 3>&1

ok() { printf 'ok %s: %s\n' "$GUEST_CASE" "$1" >&3; }
failed() { printf 'FAILED %s: %s\n' "$GUEST_CASE" "$1" >&3; }
figure() { printf '%s: %s: %s\n' "$GUEST_CASE" "$1" "$2${3:+ $3}" >&3; }
skip() { printf 'skipped: %s: %s\n' "$GUEST_CASE" "$1" >&3; }

check() {
    local text=$1
    shift
    if "$@"; then ok "$text"; else failed "$text (exit code $?)"; fi
}

same() {
    if [[ $2 == "$3" ]]; then ok "$1"; else failed "$1: wanted $2, seen $3"; fi
}

now_ms() { local t=${EPOCHREALTIME/[.,]/}; echo "${t%???}"; }

# timed NAME WORD...: its time is a figure, its exit code is the command's.
timed() {
    local name=$1 started status=0
    shift
    started=$(now_ms)
    "$@" || status=$?
    figure "$name" $(($(now_ms) - started)) ms
    return "$status"
}

reboot() { printf '%s\n' "$1" >"/share/out/$GUEST_CASE.mark"; exit 95; }
power_cut() { printf '%s\n' "$1" >"/share/out/$GUEST_CASE.mark"; exit 96; }
