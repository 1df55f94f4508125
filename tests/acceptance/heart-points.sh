# shellcheck shell=bash
# shellcheck disable=SC2154  # kilnd_pid, hello_status and so on come from scripts/lib/kilnd.sh, the rest from harness.sh
# The points of heart. Each runs in a shell of its own that has: point, its name; runtime, `process`, `incus` or empty;
# home, an empty directory; short, not empty for the short run. Source this file after points.sh.

# === What the points look at

# explained KEY WORD...: `kiln why` says all the words. What it says instead is in $home/explained.
explained() {
    local key=$1 word
    shift
    kiln why "$key" >"$home/explained" 2>&1 || return 1
    for word in "$@"; do
        grep -qF -- "$word" "$home/explained" || { echo "no \"$word\"" >>"$home/explained"; return 1; }
    done
}

# why TEXT KEY WORD...: within seconds, because what is asked about may just be on its way.
why() {
    local text=$1
    shift
    if await 15 explained "$@"; then
        ok "$text"
        sed '/^lately:/,$d; s/^/    /' "$home/explained"
    else
        not_ok "$text: $(sed '/^lately:/,/^no /{/^no /!d}' "$home/explained" | tr '\n' ' ')"
    fi
}

happened() { kiln events --json | grep -q -- "$1"; }

# routed REPO [WORD...] -> route, key
routed() {
    local repo=$1
    shift
    route=$(kiln route --repo "$repo" --json "$@")
    key=$(field key <<<"$route")
}

completes() { kiln complete "$1" "$(field buildId <<<"$2")"; }

# The pid on the host of a project's buildkitd.
buildkitd_of() {
    local first
    if [[ $runtime == process ]]; then
        pgrep -of -- "buildkitd .*--root $home/.*$1"
    else
        first=$(daemon_of "$1" | awk '{ print $2 }')
        [[ -n $first ]] && pgrep -oP "$first" buildkitd
    fi
}

# A build over the daemon's own address that does COMMAND again and again. There has to be a credential in
# $home/credential. Pid 1 of a step cannot be ended from within it, so it looks at the clock for itself.
# own_build KEY SECONDS COMMAND -> own_build_pid. It goes on for so long, or until end_own_build KEY.
own_build() {
    # shellcheck disable=SC2016  # the step's own shell expands it
    local key=$1 dir=$home/context-$1 now='$(/bin/busybox date +%s)'
    mkdir -p "$dir"
    cp "$PLACE/busybox/busybox" "$dir/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' \
        "RUN --mount=type=cache,target=/shared [\"/bin/busybox\", \"sh\", \"-c\", \"end=\$(($now + $2)); while [ $now -lt \$end -a ! -e /shared/end ]; do $3; done\"]" \
        >"$dir/Dockerfile"
    builder "own-$key" "$home/credential" "tcp://$(project "$key" address)" "$(project "$key" serverName)"
    _buildx "own-$key" build --builder by-hand --progress=plain "$dir" >"$home/logs/own-$key" 2>&1 &
    own_build_pid=$!
    if ! await 60 grep -q '2/2\] RUN' "$home/logs/own-$key"; then
        cat "$home/logs/own-$key"
        die 1 "the build does not come to its RUN"
    fi
}

# Another build of the same daemon tells it, in the cache mount that they share.
end_own_build() {
    local dir=$home/context-$1/end
    mkdir -p "$dir"
    cp "$PLACE/busybox/busybox" "$dir/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' \
        'RUN --mount=type=cache,target=/shared ["/bin/busybox", "touch", "/shared/end"]' >"$dir/Dockerfile"
    _buildx "own-$1" build --builder by-hand --progress=plain "$dir" >"$home/logs/own-$1-end" 2>&1 || cat "$home/logs/own-$1-end"
}

# === torture

point_torture() {
    local kills=100 build=20 status=0 seed=${KILN_SEED:-$RANDOM}
    [[ $runtime == process ]] || kills=20 build=30
    if [[ -n $short ]]; then
        kills=10 build=8
        [[ $runtime == process ]] || kills=3 build=10
    fi
    (cd -- "$KILN_ROOT" && cargo build --locked -p kiln-torture >&2)
    kilnd_config "$home/kiln.toml" "$runtime" '[policy]
idle_window = "2s"
idle_longest = "2s"
lease_grace = "14s"'
    local words=(--home "$home" --kilnd "$KILN_BIN/kilnd" --kiln "$KILN_BIN/kiln" --buildx "$BUILDKIT_BIN/buildx"
        --busybox "$PLACE/busybox/busybox" --runtime "$runtime" --kills "$kills" --build "$build" --grace 14 --idle 2
        --seed "$seed")
    [[ $runtime == process ]] || words+=(--incus "$PLACE/incus")
    "$KILN_BIN/kiln-torture" "${words[@]}" >"$home/said" || status=$?
    cat "$home/said"
    # 2 is a torture that could not be carried out.
    check "the torture came to its end (seed $seed)" test "$status" -le 1
    same "kilnd was killed" "$kills" "$(tortured kills)"
    check "under builds over the daemon's own address" test "$(tortured "kills that builds over the daemon's own address lived through")" -ge $((kills / 2))
    broken "no build over the daemon's own address was cut" 'own address of .* was cut'
    broken "no lease is lost or came back" 'lease .* is lost|lease .* came back|leases that nobody asked for'
    broken "every answer is still true" 'was given generation|is held|generation .* was|its idle window is|was renewed at'
    broken "every later build found its cache" 'cached steps'
    broken "no orphan and no daemon is left" 'orphan is left|daemon is left|more than one daemon'
    same "no promise at all was broken" 0 "$(tortured 'broken promises')"
}

tortured() { sed -n "s/^torture ($runtime): $1: //p" "$home/said"; }

# broken TEXT PATTERN: no broken promise is of this kind.
broken() {
    if [[ -n $(tortured 'broken promises') ]] && ! grep -E "BROKEN: .*($2)" "$home/said"; then ok "$1"; else not_ok "$1"; fi
}

# === reboot

point_reboot() {
    local hot leased idle lingering route key lease before
    kilnd_config "$home/kiln.toml" "$runtime" "$ALONE"
    kilnd_start "$home/kiln.toml"
    for repo in hot leased idle lingering; do
        hello "first-$repo" "example.com/reboot/$repo"
        same "a first build of $repo" 0 "$hello_status"
    done
    hot=$(kiln key --repo example.com/reboot/hot) leased=$(kiln key --repo example.com/reboot/leased)
    idle=$(kiln key --repo example.com/reboot/idle) lingering=$(kiln key --repo example.com/reboot/lingering)
    kiln set "$hot" --tier hot >/dev/null
    routed example.com/reboot/leased
    lease=$(leases_of "$leased")
    await 10 is_quiet "$idle"
    kiln stop "$idle" >/dev/null
    same "one sleeps" idle "$(project "$idle" phase)"
    same "three are up" 3 "$(count_daemons)"
    before=$(project "$hot" generation)

    reboot
    same "nothing runs" 0 "$(count_daemons)"
    kilnd_start "$home/kiln.toml"
    check "the hot project comes up, as a new generation" await 60 is_up "$hot" $((before + 1))
    check "so does the one with a lease" await 60 is_up "$leased" $((before + 1))
    same "the lease is as before" "$lease" "$(leases_of "$leased")"
    check "the idle one stays down" is_phase "$idle" idle
    check "and the one that nobody needs goes down" await 20 is_phase "$lingering" idle
    same "two daemons run" 2 "$(count_daemons)"
    same "nothing lost its other half" '[]' "$(kiln orphans --json)"
    for repo in hot leased idle lingering; do
        hello "second-$repo" "example.com/reboot/$repo"
        same "a build of $repo afterwards" 0 "$hello_status"
        same "finds all in its cache" "$hello_steps" "$hello_cached"
    done
    completes "$leased" "$route"
}

# Its record may still say so from before.
is_up() { [[ $(project "$1" generation) == "$2" ]] && is_phase "$1" warm; }

# Everything that runs ends at once, and what lies in memory is lost: /run, and the packet filter's rules.
reboot() {
    local pid
    kill -9 "$kilnd_pid"
    wait "$kilnd_pid" 2>/dev/null || true
    for pid in $(daemon_pids); do kill -9 "$pid" 2>/dev/null || true; done
    await 20 nothing_runs || die 1 "not all daemons end"
    rm -rf -- "${home:?}/run"
    mkdir "$home/run"
    kilnd_table_remove
}

daemon_pids() { if [[ $runtime == process ]]; then daemons | awk '{ print $1 }'; else daemons | awk '{ print $2 }'; fi; }
nothing_runs() { [[ $(count_daemons) -eq 0 ]]; }

# === rebuild

point_rebuild() {
    local asleep awake generation kept
    kilnd_config "$home/kiln.toml" "$runtime" "$ALONE"
    kilnd_start "$home/kiln.toml"
    for repo in asleep awake; do
        hello "first-$repo" "example.com/rebuild/$repo"
        same "a first build of $repo" 0 "$hello_status"
    done
    asleep=$(kiln key --repo example.com/rebuild/asleep) awake=$(kiln key --repo example.com/rebuild/awake)
    kiln set "$asleep" --idle-window 77s >/dev/null
    await 10 is_quiet "$asleep"
    kiln stop "$asleep" >/dev/null
    await 10 is_quiet "$awake"

    kilnd_stop
    check "a daemon runs on" test "$(count_daemons)" -eq 1
    rm -f "$home/state/kiln.db"*
    kilnd_start "$home/kiln.toml"
    rebuilt deleted
    # A database that is not one any more.
    kilnd_stop
    dd if=/dev/zero of="$home/state/kiln.db" bs=4096 seek=0 count=4 conv=notrunc status=none
    kilnd_start "$home/kiln.toml"
    kept=$(find "$home/state" -name 'kiln.db*' ! -name kiln.db ! -name kiln.db-wal ! -name kiln.db-shm ! -name '*.lock' | head -n 1)
    check "the damaged file is kept" test -s "$kept"
    check "the log says so, loudly" grep -q 'ERROR.*a new database is made' "$home/logs/kilnd"
    check "and the journal" happened 'damaged'
    rebuilt damaged
}

# rebuilt HOW: both projects are as they were, but for their leases and clocks.
rebuilt() {
    same "database $1: all projects are there" 2 "$(kiln ps --json | grep -c '"repo":')"
    check "database $1: the journal says so" happened 'rebuilt'
    same "database $1: a setting of a project is too" 77s "$(kiln show "$asleep" --json | sed -n '/"idleWindow"/,/}/p' | tr '\n' ' ' | sed -E 's/.*"value": "1m 17s".*/77s/; s/.*"value": "([^"]*)".*/\1/')"
    check "database $1: what sleeps, sleeps" is_phase "$asleep" idle
    check "database $1: what runs is taken up" await 30 is_phase "$awake" warm
    same "database $1: nothing lost its other half" '[]' "$(kiln orphans --json)"
    for repo in asleep awake; do
        hello "$1-$repo" "example.com/rebuild/$repo"
        same "database $1: the next build of $repo" 0 "$hello_status"
        same "database $1: finds all in its cache" "$hello_steps" "$hello_cached"
    done
    await 10 is_quiet "$asleep"
    kiln stop "$asleep" >/dev/null
    await 10 is_quiet "$awake"
}

# === wedged

point_wedged() {
    local route key generation lease pid started status
    kilnd_config "$home/kiln.toml" "$runtime" '[policy]
wedged_after = "10s"'
    kilnd_start "$home/kiln.toml"

    # One that works on every core and does not answer: a build runs, and what runs it stands still.
    routed example.com/wedged/busy --credential "$home/credential"
    generation=$(project "$key" generation)
    own_build "$key" 60 :
    pid=$(buildkitd_of "$key")
    kill -STOP "$pid"
    check "one that works and does not answer is worried about" await 60 explained "$key" 'unanswered'
    # The diagnosis would take 10 s.
    sleep 15
    same "and not replaced" "$generation" "$(project "$key" generation)"
    kill -CONT "$pid"
    check "it answers again" await 30 at_ease "$key"
    status=0
    wait "$own_build_pid" || status=$?
    [[ $status -eq 0 ]] || tail -n 5 "$home/logs/own-$key"
    same "its build ends well" 0 "$status"
    same "it is the same daemon" "$generation" "$(project "$key" generation)"
    completes "$key" "$route"

    # One that neither answers nor works.
    routed example.com/wedged/still
    generation=$(project "$key" generation) lease=$(leases_of "$key")
    pid=$(buildkitd_of "$key")
    started=$(now_ms)
    kill -STOP "$pid"
    check "one that neither answers nor works is replaced" await 90 is_generation "$key" $((generation + 1))
    figure "stopped to replaced" "$(($(now_ms) - started))" ms
    check "and is up again" await 60 is_phase "$key" warm
    check "the journal says why" happened 'it is wedged: [0-9]* calls unanswered'
    same "its lease is kept" "$lease" "$(leases_of "$key")"
    check "the old one is gone" await 20 is_gone "$pid"
    completes "$key" "$route"
}

is_generation() { [[ $(project "$1" generation) == "$2" ]]; }
at_ease() { ! explained "$1" 'unanswered'; }
is_gone() { ! kill -0 "$1" 2>/dev/null; }

# === why

point_why() {
    local key route first second third
    runtime=process
    cp "$BUILDKIT_BIN/buildkitd" "$home/buildkitd"
    kilnd_config "$home/kiln.toml" "$runtime" '[policy]
idle_window = "1m"
idle_longest = "1m"
lease_grace = "12s"
[admission]
running = 3'
    sed -i "s,^buildkitd = .*,buildkitd = \"$home/buildkitd\"," "$home/kiln.toml"
    kilnd_start "$home/kiln.toml"

    routed example.com/why/first --credential "$home/credential"
    first=$key
    why "a lease" "$first" warm '1 live lease(s)' 'unless it is renewed or a connection opens'
    kiln set "$first" --volume 3GiB >/dev/null
    why "a roll held back by a build" "$first" 'out of date' 'its configuration' 'replaced when no build needs it'
    why "a roll held back by a lease that was not released" "$first" 'no longer used and keeps nothing up' \
        'a lease that was not released holds that back for another'
    own_build "$first" 8 '/bin/busybox sleep 1'
    completes "$first" "$route"
    why "a build by the daemon's own account" "$first" '1 build(s) run in it, by its own account'
    wait "$own_build_pid" || true
    # Its roll would wait in the queue too.
    kiln stop "$first" >/dev/null

    hello connection example.com/why/second --build-arg ROUND=1
    second=$(kiln key --repo example.com/why/second)
    connected &
    third=$!
    why "a connection" "$second" warm '1 open connection(s)' 'through the gateway'
    wait "$third"
    await 10 is_quiet "$second"
    why "an idle window" "$second" warm 'its idle window of 1 min is open' 'it is stopped in' 'its cache stays'
    kiln set "$second" --tier hot >/dev/null
    why "hot" "$second" warm 'the project is hot' 'comes up again when it died'
    kiln set "$second" --tier warm >/dev/null
    kiln stop "$second" >/dev/null
    why "stopped" "$second" idle 'it is down, and nobody needs it'

    # Three daemons that are needed: the next one has to wait.
    local number keys=()
    for number in 1 2 3; do
        routed "example.com/why/many-$number"
        kiln set "$key" --tier hot >/dev/null
        completes "$key" "$route"
        keys+=("$key")
    done
    routed_later example.com/why/queued
    why "queued for a start" "$key" 'waits for its turn to start, number 1 of 1' 'daemons are up'
    # Without a setting of its own it would be forgotten with its only build.
    kiln set "$key" --idle-window 45s >/dev/null
    completes "$key" "$route"
    why "never built" "$key" absent 'it is down, and nobody needs it'
    for number in "${keys[@]}"; do kiln set "$number" --tier warm >/dev/null; done

    # A daemon that cannot start.
    printf '#!/bin/sh\necho "the moon is in the wrong quarter" >&2\nexit 3\n' >"$home/buildkitd.new"
    chmod 755 "$home/buildkitd.new"
    mv "$home/buildkitd.new" "$home/buildkitd"
    routed_later example.com/why/failing
    why "a start that failed" "$key" failed 'the moon is in the wrong quarter' 'setback(s) in a row' 'waiting before the next try'
    completes "$key" "$route"
}

# The answer comes at once, with a lease and without a daemon. routed_later REPO -> route, key
routed_later() {
    route=$(curl --silent --max-time 20 --unix-socket "$home/run/kiln.sock" 'http://kiln/route?wait=0' \
        --data "{\"repo\":\"$1\",\"arch\":\"$(uname -m)\"}")
    key=$(field key <<<"$route")
}

# A connection through the gateway that is open for a while.
connected() {
    mkdir -p "$home/context"
    cp "$PLACE/busybox/busybox" "$home/context/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' 'RUN ["/bin/busybox", "sleep", "6"]' >"$home/context/Dockerfile"
    HOME=$home/client KILN_BUILDX=$BUILDKIT_BIN/buildx kiln build --repo example.com/why/second "$home/context" \
        </dev/null >"$home/logs/connected" 2>&1 || cat "$home/logs/connected"
}

# === simulate

point_simulate() {
    local seeds=10000 profile=(--profile sim) status=0
    [[ -z $short ]] || seeds=300 profile=()
    if [[ ! -d $KILN_ROOT/crates/sim ]]; then
        skip "$seeds simulated schedules: there is no crates/sim"
        return
    fi
    (cd -- "$KILN_ROOT" && cargo run --locked "${profile[@]}" -p kiln-sim -- --seeds "$seeds") >"$home/said" 2>&1 || status=$?
    if [[ $status -eq 0 ]]; then tail -n 12 "$home/said"; else tail -n 100 "$home/said"; fi
    same "$seeds simulated schedules, no invariant broken" 0 "$status"
}

# === scale

point_scale() {
    local words=(--dir "$PLACE" --buildkitd "$BUILDKIT_BIN/buildkitd" --addresses "127.$KILN_RANGE.0.0/16")
    [[ -z $short ]] || words+=(--short --projects 2000)
    bench_program
    if [[ -z $short ]]; then (cd -- "$KILN_ROOT" && cargo build --locked --release --bin kilnd >&2); fi
    kiln_bench scale "${words[@]}"
    sed 's/^/    /; s/^    bar: /bar: /' "$home/bench"
    check "it was measured" grep -q '^bar: scale: boot' "$home/bench"
    # A machine's noise is not five seconds, nor a hundred MiB.
    check "a boot takes less than 5 s" holds "$(measured 'boot to first /route, median ms') < 5000"
    check "and holds less than 160 MiB" holds "$(measured 'resident MiB') < 160"
}

# measured NAME: the last column of that line.
measured() { awk -v name="$1" 'index($0, name) { print $NF; exit }' "$home/bench"; }
