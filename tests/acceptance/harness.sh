# shellcheck shell=bash
# shellcheck disable=SC2154  # PER_RUNTIME and so on come from the script, kilnd_pid and so on from scripts/lib
# What the scripts of acceptance have in common: their arguments, what they need, and one point after the other. Source
# this file after scripts/lib/kilnd.sh, then call `acceptance "$@"`.
#
# Set before: PREFIX, of the run's directory; PER_RUNTIME and ONCE, the names of the points; NOT_SHORT, those of ONCE that
# the short run leaves out; ON_INCUS, those of PER_RUNTIME that runtime `process` does not have; PACKAGES that the points need
# beside the usual ones. A point is a function `point_NAME`; what it leaves beside processes is for `end_NAME`, where there is
# one.
#
#   ok TEXT, not_ok TEXT             a result
#   check TEXT WORD...               the command succeeds
#   same TEXT WANTED SEEN            two texts are equal
#   figure NAME VALUE UNIT           a figure
#   skip TEXT                        what is not looked at, and why

PLACE=''
short=''
point_pid=''

usage() { die 64 "usage: tests/acceptance/${0##*/} [--short] [--runtime process|incus|both] [POINT...]"; }

acceptance() {
    local wanted=both points=() runtimes=() runtime point status known
    known=" ${PER_RUNTIME[*]} ${ONCE[*]} ${NOT_SHORT[*]} "
    while [[ $# -gt 0 ]]; do
        case $1 in
            --short) short=1 ;;
            --runtime) [[ $# -gt 1 ]] || usage; wanted=$2; shift ;;
            --runtime=*) wanted=${1#*=} ;;
            -*) usage ;;
            *) [[ $known == *" $1 "* ]] || usage; points+=("$1") ;;
        esac
        shift
    done
    case $wanted in process | incus | both) ;; *) usage ;; esac
    [[ $EUID -eq 0 ]] || die 2 "BuildKit runs builds in namespaces of their own: run this as root"
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    need_packages ca-certificates openssl curl git runc procps "${PACKAGES[@]}"
    if [[ -z ${KILN_BIN:-} ]]; then
        need_packages gcc libc6-dev
        need_toolchains
    fi
    build_kiln
    build_buildkit
    # Short: a socket's path has at most 108 bytes, and daemons' are below it.
    place_make "$PREFIX"
    : >"$PLACE/results"
    find_busybox
    [[ $wanted == incus ]] || runtimes+=(process)
    if [[ $wanted != process ]]; then
        step "a private Incus"
        # A shell of its own: what the libraries do to give up must not end the points that need no Incus.
        set +e
        (set -e; private_incus) </dev/null
        status=$?
        set -e
        if [[ $status -eq 0 ]]; then
            runtimes+=(incus)
        elif [[ $wanted == incus ]]; then
            die 2 "there is no Incus to be had: the reason is above"
        else
            skip "every point on runtime incus: there is no Incus to be had, the reason is above"
        fi
    fi
    [[ -n $short ]] || ONCE+=("${NOT_SHORT[@]}")
    [[ ${#points[@]} -gt 0 ]] || points=("${PER_RUNTIME[@]}" "${ONCE[@]}")
    for runtime in "${runtimes[@]}"; do
        for point in "${PER_RUNTIME[@]}"; do
            [[ $runtime == incus || " ${ON_INCUS[*]:-} " != *" $point "* ]] || continue
            if [[ " ${points[*]} " == *" $point "* ]]; then run_point "$point" "$runtime"; fi
        done
    done
    for point in "${ONCE[@]}"; do
        if [[ " ${points[*]} " == *" $point "* ]]; then run_point "$point" ''; fi
    done
    step
    tell
}

skip() { echo "skipped: $1"; }

# What a point may take: several times what the longest takes, on a machine that does other things beside.
point_seconds() {
    local seconds=7200
    [[ -z $short ]] || seconds=900
    echo $((seconds * ${KILN_PATIENCE:-1}))
}

# One point in a shell of its own, with a kilnd of its own: one that gives up must not end the others, and as a process
# group it can be ended whole.
run_point() {
    local status=0
    step "$1${2:+ on $2}"
    set -m
    # shellcheck disable=SC2030,SC2031  # these are the point's own
    (
        set -e
        point=$1 runtime=$2 home=$PLACE/${2:0:1}-$1
        trap end_point EXIT
        mkdir -p "$home"
        "point_$1"
    ) </dev/null &
    point_pid=$!
    set +m
    if ! ended "$point_pid" "$(point_seconds)"; then
        point=$1 runtime=$2
        not_ok "it ends within $(point_seconds) s"
        end_group "$point_pid"
    fi
    wait "$point_pid" || status=$?
    point_pid=''
    if [[ $status -ne 0 ]]; then
        point=$1 runtime=$2
        not_ok "the point came to its end (exit code $status)"
        tail -n 20 "$PLACE/${2:0:1}-$1/logs/kilnd" 2>/dev/null | sed 's/^/    kilnd: /' || true
    fi
}

# Nothing of a point is in the next one's way.
end_point() {
    local name deleting=()
    set +e
    kilnd_stop
    # shellcheck disable=SC2031  # it is called in the point's shell
    if declare -F "end_$point" >/dev/null; then "end_$point"; fi
    # shellcheck disable=SC2031
    _place_end_processes "$home"
    [[ $runtime == incus ]] || return 0
    for name in $(incus_of_place list --project kiln --columns n --format csv); do
        incus_of_place delete --force --project kiln "$name" &
        deleting+=("$!")
    done
    [[ ${#deleting[@]} -eq 0 ]] || wait "${deleting[@]}"
    kilnd_table_remove
    # shellcheck disable=SC2031
    [[ -z ${KILN_DATASET:-} ]] || zfs destroy -R "$KILN_DATASET/${home##*/}"
}

_result() {
    local line="$1 $point${runtime:+ ($runtime)}: $2"
    printf '%s\n' "$line" | tee -a "$PLACE/results"
}

ok() { _result ok "$1"; }
not_ok() { _result 'not ok' "$1"; }

# check TEXT WORD...: the command succeeds.
check() {
    local text=$1
    shift
    if "$@"; then ok "$text"; else not_ok "$text"; fi
}

# same TEXT WANTED SEEN
same() {
    if [[ $2 == "$3" ]]; then ok "$1"; else not_ok "$1: wanted $2, seen $3"; fi
}

figure() { printf '%s: %s %s\n' "$point${runtime:+ ($runtime)}: $1" "$2" "$3"; }

tell() {
    local passed failed
    passed=$(grep -c '^ok ' "$PLACE/results" || true)
    failed=$(grep -c '^not ok ' "$PLACE/results" || true)
    [[ $failed -eq 0 ]] || { echo; grep '^not ok ' "$PLACE/results"; }
    printf '%s passed, %s failed\n' "$passed" "$failed"
    [[ $failed -eq 0 && $passed -gt 0 ]]
}

clean_up() {
    local status=$?
    trap '' HUP INT TERM
    set +e
    if [[ -n $point_pid ]]; then
        end_group "$point_pid"
    fi
    if [[ -n $PLACE ]]; then
        place_remove
        kilnd_table_remove
    fi
    exit "$status"
}
