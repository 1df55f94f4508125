# shellcheck shell=bash
# A kilnd of our own, below PLACE, that meets neither an admin's nor another script's. Source this file after place.sh.
# shellcheck disable=SC2034  # what is set here is for who sources it
#
#   find_busybox                     a static busybox -> PLACE/busybox
#   private_incus                    an Incus in PLACE/incus with Kiln's image; caches on btrfs in PLACE/btrfs
#   kilnd_config FILE RUNTIME [TOML] writes a configuration whose directories lie in FILE's; TOML is put at its end
#   kilnd_start FILE                 starts kilnd and waits until it answers -> kilnd_pid
#   kilnd_stop                       ends it as an admin would; its daemons stay
#   kilnd_table_remove               removes the nftables table
#   kiln WORD...                     the client, of the kilnd that was started last
#   field NAME                       the first value of that name in JSON on stdin
#   project KEY NAME                 what `kiln show` says
#   is_quiet KEY                     nobody is connected to it
#   await SECONDS WORD...            waits until the command succeeds; fails at the deadline
#
# KILN_INCUS is the directory of an Incus that is there already and has a pool `kiln`, in place of a private one; KILN_DATASET a
# dataset of ZFS below which caches lie, in place of a btrfs. KILN_BASE is a tar for the image to begin with, in place of Debian.
# KILN_PATIENCE is how many times as long is waited for everything, on a machine that is so much slower.
#
# Set before: KILN_RANGE, the middle number of the daemons' addresses (127.RANGE.0.0/16, 10.RANGE.0.0/16), and
# KILN_TABLE, the nftables table.

kilnd_pid=''
_kilnd_home=''

# A static busybox: the machine's own, or the one in Debian's package, which need not be installed for that.
find_busybox() {
    local own
    mkdir -p "$PLACE/busybox"
    own=$(type -P busybox || true)
    if [[ -n $own ]] && ! ldd "$own" >/dev/null 2>&1; then
        cp -L -- "$own" "$PLACE/busybox/busybox"
        return
    fi
    say "taking busybox from Debian's busybox-static"
    apt-cache show busybox-static >/dev/null 2>&1 || _apt update
    mkdir -p "$PLACE/package"
    (cd "$PLACE/package" && _apt -o APT::Sandbox::User=root download busybox-static && dpkg-deb -x ./*.deb .) ||
        die 2 "cannot get busybox-static: install it by hand"
    # The package has other files of that name.
    own=$(find "$PLACE/package" -path '*/bin/busybox' -type f -print -quit)
    [[ -n $own ]] || die 2 "busybox-static has no bin/busybox: install it by hand"
    cp -L -- "$own" "$PLACE/busybox/busybox"
}

private_incus() {
    local init
    echo "$KILN_TABLE" >"$PLACE/nft-table"
    if [[ -z ${KILN_INCUS:-} ]]; then
        incus_install
        need_packages debootstrap nftables
        incus_up "$PLACE/incus"
    fi
    if [[ -z ${KILN_DATASET:-} ]]; then
        need_packages btrfs-progs
        mkdir -p "$PLACE/btrfs"
        truncate -s 8G "$PLACE/btrfs.img"
        mkfs.btrfs -q "$PLACE/btrfs.img" >/dev/null
        mount -o loop "$PLACE/btrfs.img" "$PLACE/btrfs"
    fi
    init=$(build_init)
    "$KILN_BIN/kiln" image build --buildkitd "$BUILDKIT_BIN/buildkitd" --init "$init" \
        --incus-socket "$(incus_directory)/unix.socket" --cache "$(kiln_cache)/image" ${KILN_BASE:+--base "$KILN_BASE"} >&2
}

incus_directory() { echo "${KILN_INCUS:-$PLACE/incus}"; }

# A port nobody listens on now. Below the range that the kernel gives to clients.
free_port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 12000))
        (exec 7<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
    echo "$port"
}

kilnd_config() {
    local file=$1 runtime=$2 more=${3:-} home engine=dir dataset='' volumes addresses=127.$KILN_RANGE.0.0/16 patience=${KILN_PATIENCE:-1}
    home=$(dirname -- "$file")
    volumes=$home/volumes
    [[ $runtime == process ]] || engine=btrfs volumes=$PLACE/btrfs/${home##*/} addresses=10.$KILN_RANGE.0.0/16
    if [[ $runtime != process && -n ${KILN_DATASET:-} ]]; then
        engine=zfs volumes=$PLACE/zfs/${home##*/}
        dataset="dataset = \"$KILN_DATASET/${home##*/}\""
        zfs list "$KILN_DATASET/${home##*/}" >/dev/null 2>&1 || zfs create -p -o "mountpoint=$volumes" "$KILN_DATASET/${home##*/}"
    fi
    mkdir -p "$home/run" "$home/logs" "$volumes"
    [[ -d $home/state ]] || mkdir -m 0700 "$home/state"
    cat >"$file" <<TOML
state_dir = "$home/state"
run_dir = "$home/run"

[api]
listen = "127.0.0.1:$(free_port)"
route_wait = "$((patience * 3))m"

[gateway]
listen = "127.0.0.1:$(free_port)"

[runtime]
kind = "$runtime"
addresses = "$addresses"

[runtime.incus]
socket = "$(incus_directory)/unix.socket"
pool = "kiln"
table = "$KILN_TABLE"

[volumes]
engine = "$engine"
path = "$volumes"
size = "4GiB"
$dataset

[buildkit]
buildkitd = "$BUILDKIT_BIN/buildkitd"
ready_within = "${patience}m"

$more
TOML
    chmod 600 "$file"
}

kilnd_start() {
    _kilnd_home=$(dirname -- "$1")
    # A kilnd that was killed leaves its socket, and nothing may take that for an answer.
    "$KILN_BIN/kilnd" --config "$1" </dev/null >>"$_kilnd_home/logs/kilnd" 2>&1 &
    kilnd_pid=$!
    if await 30 _kilnd_answers; then return 0; fi
    tail -n 30 "$_kilnd_home/logs/kilnd" >&2
    die 1 "kilnd does not answer: its last words are above"
}

# Also when it has ended already: then waiting is of no use, and the caller's next look fails.
_kilnd_answers() {
    kill -0 "$kilnd_pid" 2>/dev/null || die 1 "kilnd ended at once: $(tail -n 5 "$_kilnd_home/logs/kilnd")"
    kiln ps >/dev/null 2>&1
}

kilnd_stop() {
    [[ -n $kilnd_pid ]] || return 0
    kill "$kilnd_pid" 2>/dev/null || true
    ended "$kilnd_pid" 20 || kill -9 "$kilnd_pid" 2>/dev/null || true
    wait "$kilnd_pid" 2>/dev/null || true
    kilnd_pid=''
}

kilnd_table_remove() { ! type -P nft >/dev/null || nft delete table inet "$KILN_TABLE" 2>/dev/null || true; }

kiln() { "$KILN_BIN/kiln" --socket "$_kilnd_home/run/kiln.sock" "$@"; }

field() { sed -nE "s/.*\"$1\": *\"?([^\",]*).*/\1/p" | head -n 1; }

project() { kiln show "$1" --json | field "$2"; }

is_quiet() { [[ $(project "$1" connections) == 0 ]]; }

await() {
    local end=$(($(now_ms) + $1 * 1000 * ${KILN_PATIENCE:-1}))
    shift
    until "$@"; do
        [[ $(now_ms) -lt $end ]] || return 1
        sleep 0.1
    done
}

# hello NAME REPO [FLAG...]: builds examples/hello through the gateway, from a client that has never built anything.
# -> hello_status, hello_ms, hello_steps, hello_cached, hello_log, hello_out
# HELLO_FLAGS are flags of every one.
HELLO_FLAGS=()
hello() {
    local name=$1 repo=$2 client=$_kilnd_home/client-$1 started
    shift 2
    mkdir -p "$client"
    hello_log=$_kilnd_home/logs/$name hello_out=$_kilnd_home/out-$name hello_status=0
    started=$(now_ms)
    HOME=$client XDG_CACHE_HOME=$client/cache DOCKER_CONFIG=$client/docker KILN_BUILDX=$BUILDKIT_BIN/buildx \
        kiln build --repo "$repo" --progress=plain --build-context "busybox=$PLACE/busybox" -o "$hello_out" \
        "${HELLO_FLAGS[@]}" "$@" \
        "$KILN_ROOT/examples/hello" </dev/null >"$hello_log" 2>&1 || hello_status=$?
    hello_ms=$(($(now_ms) - started))
    count_steps "$hello_log"
}

# A step of the Dockerfile is announced as `#7 [build 2/4] RUN …`; found in the cache it says `#7 CACHED`.
count_steps() {
    hello_steps=$(grep -oE '^#[0-9]+ \[([^]]* )?[0-9]+/[0-9]+\] ' "$1" | cut -d' ' -f1 | sort -u | wc -l || true)
    hello_cached=$(grep -cE '^#[0-9]+ CACHED$' "$1" || true)
}
