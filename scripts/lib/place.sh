# shellcheck shell=bash
# A directory for one run of a script: everything that runs, mounts or lies there goes with it, also after the script
# was killed. Source this file after common.sh.
#
#   place_make PREFIX    removes what killed runs left, then makes PLACE
#   place_remove [DIR]   ends every process that works in DIR (default: PLACE), unmounts, removes; also the nftables table
#                        `inet NAME` if DIR/nft-table holds a NAME

# "PID START": no other process has both; nothing for a zombie. Not a lock: whatever a killed script started would hold
# it on.
_place_owner() { awk '$3 != "Z" { print $1, $22 }' "/proc/$1/stat" 2>/dev/null; }

_place_is_leftover() {
    local pid start
    if read -r pid start 2>/dev/null <"$1/owner"; then
        [[ $(_place_owner "$pid") != "$pid $start" ]]
    else
        # One that is just being made has no owner yet.
        [[ -n $(find "$1" -maxdepth 0 -mmin +1) ]]
    fi
}

place_make() {
    local base=${KILN_DEMO_DIR:-/var/tmp} old
    mkdir -p -- "$base"
    base=$(realpath -- "$base")
    for old in "$base/$1".??????; do
        if [[ -d $old ]] && _place_is_leftover "$old"; then
            say "removing what a killed run left in $old"
            place_remove "$old"
        fi
    done
    PLACE=$(mktemp -d -- "$base/$1.XXXXXX")
    # An unprivileged container's root must get through to its own files below here, and need not list what is here.
    chmod 0711 -- "$PLACE"
    _place_owner "$$" >"$PLACE/owner"
}

# Pids of the processes that name DIR in their command line, this script and its parents left out.
_place_processes() {
    local dir=$1 proc pid self=$BASHPID ours=" $$ "
    while [[ $self -gt 1 ]]; do
        ours+="$self "
        self=$(awk '$1 == "PPid:" { print $2 }' "/proc/$self/status" 2>/dev/null || echo 0)
    done
    for proc in /proc/[0-9]*; do
        pid=${proc##*/}
        [[ $ours != *" $pid "* ]] || continue
        if tr '\0' '\n' 2>/dev/null <"$proc/cmdline" | grep -qF -- "$dir/"; then printf '%s\n' "$pid"; fi
    done
}

# First asks, then after 15 s insists.
_place_end_processes() {
    local dir=$1 signal pid tries pids
    for signal in TERM KILL; do
        mapfile -t pids < <(_place_processes "$dir")
        [[ ${#pids[@]} -gt 0 ]] || return 0
        for pid in "${pids[@]}"; do kill -s "$signal" "$pid" 2>/dev/null || true; done
        for ((tries = 0; tries < 150; tries++)); do
            [[ -n $(_place_processes "$dir") ]] || return 0
            sleep 0.1
        done
    done
    say "these processes in $dir do not end: $(_place_processes "$dir" | tr '\n' ' ')"
}

place_remove() {
    local dir=${1:-$PLACE} mount
    [[ -n $dir && -d $dir ]] || return 0
    if declare -F incus_down >/dev/null && [[ -d $dir/incus ]]; then incus_down "$dir/incus" || true; fi
    _place_end_processes "$dir"
    # After kilnd, which would put it back.
    if [[ -s $dir/nft-table ]] && type -P nft >/dev/null; then
        nft delete table inet "$(cat "$dir/nft-table")" 2>/dev/null || true
    fi
    # Deepest first. A loop device that mount made goes with its mount.
    while read -r mount; do
        umount -- "$mount" 2>/dev/null || umount -l -- "$mount" || true
    done < <(awk -v dir="$dir/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | sort -r)
    rm -rf --one-file-system -- "$dir" || say "cannot remove $dir; remove it by hand"
}
