# shellcheck shell=bash
# What every script needs: saying what happens and how long it took, and the programs it is made with. Source this file.
#
#   say TEXT...            a line on stderr
#   step TEXT...           the heading of a part; says how long the part before took
#   die CODE TEXT...       says why, and exits
#   now_ms                 milliseconds, for differences
#   seconds MS             "1.2 s"
#   need_packages NAME...  installs those Debian packages that are missing, from the machine's own sources
#   need_toolchains        finds or installs Rust and Go; sets PATH
#   kiln_cache             the directory that slow results are kept in
#   ended PID SECONDS      waits for a job to end; fails at the deadline
#   end_group PID          ends a job that is a process group, by force if it does not go

RUST_FLOOR=1.95
GO_FLOOR=1.26

if [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    _bold=$'\e[1m' _red=$'\e[31m' _plain=$'\e[0m'
else
    _bold='' _red='' _plain=''
fi

now_ms() { local t=${EPOCHREALTIME/[.,]/}; echo "${t%???}"; }

seconds() { printf '%d.%d s' $(($1 / 1000)) $(($1 % 1000 / 100)); }

say() { printf '%s\n' "$*" >&2; }

_step_started=''
step() {
    local now
    now=$(now_ms)
    [[ -z $_step_started ]] || say "    ($(seconds $((now - _step_started))))"
    _step_started=$now
    [[ $# -eq 0 ]] || printf '%s== %s%s\n' "$_bold" "$*" "$_plain" >&2
}

die() {
    local code=$1
    shift
    printf '%s%s: %s%s\n' "$_red" "${0##*/}" "$*" "$_plain" >&2
    exit "$code"
}

kiln_cache() {
    local dir=${XDG_CACHE_HOME:-$HOME/.cache}/kiln
    mkdir -p -- "$dir"
    printf '%s\n' "$dir"
}

# A job that has ended is reaped by the shell at once, and its number is nobody's then. `wait` is what a trap can cut short.
ended() {
    timeout "$2" tail -s 0.1 --pid="$1" -f /dev/null &
    wait "$!"
}

end_group() {
    kill -- "-$1" 2>/dev/null || return 0
    # It may have much to clean up.
    ended "$1" 120 || kill -KILL -- "-$1" 2>/dev/null || true
}

_apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

need_packages() {
    local package missing=()
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    [[ $EUID -eq 0 ]] || die 2 "these packages are missing: run, as root, apt-get install ${missing[*]}"
    say "installing ${missing[*]}"
    _apt install -y --no-install-recommends "${missing[@]}" 2>/dev/null && return 0
    # The lists may be absent or old.
    _apt update && _apt install -y --no-install-recommends "${missing[@]}" && return 0
    die 2 "cannot install ${missing[*]}: see apt's words above, and install them by hand"
}

# at_least VERSION FLOOR
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

_rust_version() { cargo --version 2>/dev/null | awk '{ print $2 }'; }
_go_version() { GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//'; }

# toolchain NAME FLOOR VERSION_FUNCTION REMEDY PACKAGE...: the first package's candidate must reach the floor.
_toolchain() {
    local name=$1 floor=$2 version=$3 remedy=$4 found candidate
    shift 4
    found=$("$version" || true)
    if [[ -n $found ]] && at_least "$found" "$floor"; then return 0; fi
    if [[ $EUID -eq 0 ]]; then
        candidate=$(apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: *\([0-9]*:\)\{0,1\}//p')
        if [[ $candidate == [0-9]* ]] && at_least "$candidate" "$floor"; then
            need_packages "$@"
            hash -r
            found=$("$version" || true)
            if [[ -n $found ]] && at_least "$found" "$floor"; then return 0; fi
        fi
    fi
    die 2 "$name $floor or newer is needed, and ${found:-none} is here (Debian's is too old): $remedy"
}

need_toolchains() {
    local dir
    # Where their own installers put them. What is on the PATH already goes first, unless it is too old.
    for dir in "$HOME/.cargo/bin" /usr/local/cargo/bin /usr/local/go/bin; do
        [[ ! -d $dir || :$PATH: == *:$dir:* ]] || PATH=$PATH:$dir
    done
    at_least "$(_rust_version || true)" "$RUST_FLOOR" || [[ ! -x $HOME/.cargo/bin/cargo ]] || PATH=$HOME/.cargo/bin:$PATH
    at_least "$(_go_version || true)" "$GO_FLOOR" || [[ ! -x /usr/local/go/bin/go ]] || PATH=/usr/local/go/bin:$PATH
    export PATH
    _toolchain Rust "$RUST_FLOOR" _rust_version \
        "install it from https://rustup.rs, so that cargo is in ~/.cargo/bin" cargo rustc
    _toolchain Go "$GO_FLOOR" _go_version \
        "unpack it from https://go.dev/dl into /usr/local/go" golang-go
    say "Rust $(_rust_version), Go $(_go_version)"
}
