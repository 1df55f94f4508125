# shellcheck shell=bash
# shellcheck disable=SC2154  # root and log are set by who sources this
# What the two halves of the image's making have in common. Source this file after common.sh, then call `own_namespace "$@"`.
#
# Set before: root, the root file system; log, a file that a stage's output goes to.

# Everything happens in a mount namespace: what is mounted here ends with this process, and whoever removes something
# half-made never meets the machine's /dev in it.
own_namespace() {
    if [[ ${KILN_GUEST_NAMESPACE-} != made ]]; then
        KILN_GUEST_NAMESPACE=made exec unshare --mount --pid --fork --kill-child -- "$0" "$@"
    fi
    # Process 1 of a namespace gets no signal that it does not ask for.
    trap 'exit 143' HUP INT TERM
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C
}

# stage NAME WORD...: says how long it took; its output is shown only if it fails.
stage() {
    local name=$1 started status=0
    shift
    started=$(now_ms)
    # A shell of its own, or `set -e` would be off in it behind `||`.
    set +e
    (set -e; "$@") >"$log" 2>&1 </dev/null
    status=$?
    set -e
    if [[ $status -ne 0 ]]; then
        tail -n 60 -- "$log" >&2
        die 1 "the guest's $name cannot be made: the reason is above"
    fi
    say "    guest: $name: $(seconds $(($(now_ms) - started)))"
}

root_mount() {
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount --bind /dev "$root/dev"
}

root_umount() { umount "$root/proc" "$root/sys" "$root/dev"; }

in_root() { chroot "$root" "$@"; }

kernel_version() { basename -- "$root"/lib/modules/*; }
