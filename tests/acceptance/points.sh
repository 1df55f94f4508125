# shellcheck shell=bash
# shellcheck disable=SC2154  # kilnd_pid, hello_status and so on come from scripts/lib/kilnd.sh, the rest from main-job
# The points of main-job. Each runs in a shell of its own that has: point, its name; runtime, `process`, `incus` or empty;
# home, an empty directory; short, not empty for the short run. Source this file after scripts/lib/kilnd.sh.

# For a point whose subject is a project's one daemon: none beside it for many builds, and none that tries a snapshot out.
ALONE='[fan_out]
members = 0

[snapshots]
every = "0s"'

# === What the points look at

# daemons: a line for each buildkitd of this home's projects, in words that no other run of it shares.
daemons() {
    local pid
    if [[ $runtime == process ]]; then
        for pid in $(pgrep -f -- "buildkitd .*$home/" || true); do
            _since "$pid"
        done
    else
        # The pid on the host of each instance's init.
        incus_of_place list --project kiln --columns nsp --format csv | sed -n 's/^\([^,]*\),RUNNING,/\1 /p'
    fi
}

# A pid alone may be another process's by now.
_since() { printf '%s since %s\n' "$1" "$(awk '{ print $22 }' "/proc/$1/stat" 2>/dev/null)"; }

daemon_of() {
    if [[ $runtime == process ]]; then
        local pid
        for pid in $(pgrep -f -- "buildkitd .*$home/.*$1" || true); do _since "$pid"; done
    else
        daemons | grep -F -- "$1" || true
    fi
}

count_daemons() { daemons | grep -c . || true; }

incus_of_place() { INCUS_DIR=$(incus_directory) incus "$@" </dev/null; }

leases_of() { kiln show "$1" --json | sed -n 's/.*"id": "\([0-9a-f]*\)".*/\1/p' | sort; }

# How many leases and connections all projects have.
all_leases() { kiln ps --json | grep -c '"renewed":' || true; }
no_leases() { [[ $(all_leases) -eq 0 ]]; }
no_connections() { ! kiln ps --json | grep '"connections":' | grep -v '"connections": 0' >/dev/null; }
is_phase() { [[ $(project "$1" phase) == "$2" ]]; }

# starts: "COUNT KEY" of every start in the journal.
starts() { kiln events --json | grep '"text":"start instance' | sed -n 's/.*"key":"\([^"]*\)".*/\1/p' | sort | uniq -c; }

says() { grep -q -- "$2" <<<"$1"; }

# === Clients

# A client of its own that builds with a builder made by hand. builder NAME DIR ENDPOINT SERVER_NAME
builder() {
    _buildx "$1" create --name by-hand --driver remote --driver-opt "cacert=$2/ca.pem" --driver-opt "cert=$2/cert.pem" \
        --driver-opt "key=$2/key.pem" --driver-opt "servername=$4" "$3" >/dev/null
}

_buildx() {
    local client=$home/buildx-$1
    shift
    mkdir -p "$client"
    HOME=$client DOCKER_CONFIG=$client BUILDX_CONFIG=$client/buildx "$BUILDKIT_BIN/buildx" "$@" </dev/null
}

# asks DIR ADDRESS SERVER_NAME [CA_DIR]: a real call to a daemon with the credential in DIR.
asks() {
    timeout 20 "$BUILDKIT_BIN/buildctl" --addr "tcp://$2" --tlsservername "$3" --tlscacert "${4:-$1}/ca.pem" \
        --tlscert "$1/cert.pem" --tlskey "$1/key.pem" debug workers >"$home/asked" 2>&1
}

# Never let in, and the daemon's own refusal: an alert in TLS. The daemon closes right behind the alert, and a client that
# is just writing then sees only the reset; so it is asked a few times. is_refused WORD...: asks, or another call.
is_refused() {
    local tries
    for ((tries = 0; tries < 60; tries++)); do
        if "$@"; then return 1; fi
        if grep -q 'remote error: tls' "$home/asked"; then return 0; fi
    done
    cat "$home/asked"
    return 1
}

# === builds

point_builds() {
    local repo=example.com/acceptance/builds key route generation log
    kilnd_config "$home/kiln.toml" "$runtime"
    kilnd_start "$home/kiln.toml"
    key=$(kiln key --repo "$repo")

    hello cold "$repo"
    same "a build through the gateway" 0 "$hello_status"
    [[ $hello_status -eq 0 ]] || { cat "$hello_log"; return 1; }
    same "which found nothing cached" 0 "$hello_cached"
    figure "cold build" "$hello_ms" ms
    hello warm "$repo"
    same "the same from a fresh client" 0 "$hello_status"
    same "all cached" "$hello_steps" "$hello_cached"
    check "and there were steps" test "$hello_steps" -gt 3
    figure "warm build" "$hello_ms" ms

    await 10 is_quiet "$key"
    check "kiln stop" stops "$key"
    same "the stopped project is idle" idle "$(project "$key" phase)"
    same "its daemon is gone" '' "$(daemon_of "$key")"
    hello round "$repo" --build-arg ROUND=second
    same "a later build" 0 "$hello_status"
    check "finds in its cache mount what the first one wrote" grep -q 'in the first round' "$hello_out/greeting.txt"
    figure "build after a wake" "$hello_ms" ms

    # A client that knows nothing of Kiln: a builder for the gateway's name, no call to /route before the build.
    route=$(kiln route --repo "$repo" --credential "$home/credential" --json)
    builder plain "$home/credential" "$(field endpoint <<<"$route")" "$(field serverName <<<"$route")"
    kiln complete "$key" "$(field buildId <<<"$route")"
    await 10 is_quiet "$key"
    kiln stop "$key" >/dev/null
    generation=$(project "$key" generation)
    same "stopped again" idle "$(project "$key" phase)"
    log=$home/logs/plain
    check "a plain buildx against the gateway wakes it" plain_build "$log"
    count_steps "$log"
    check "and finds its cache" test "$hello_cached" -gt 3
    same "with one start" "$((generation + 1))" "$(project "$key" generation)"
}

plain_build() {
    _buildx plain build --builder by-hand --progress=plain --build-context "busybox=$PLACE/busybox" \
        -o "$home/out-plain" "$KILN_ROOT/examples/hello" >"$1" 2>&1 || { cat "$1"; return 1; }
}

stops() { kiln stop "$1" >/dev/null; }

# === kill

point_kill() {
    local repo=example.com/acceptance/kill idle=5 key route address build build_status=0 said killed
    local -A before after
    kilnd_config "$home/kiln.toml" "$runtime" "[policy]
idle_window = \"${idle}s\"
lease_grace = \"30m\""
    kilnd_start "$home/kiln.toml"
    route=$(kiln route --repo "$repo" --credential "$home/credential" --json)
    key=$(field key <<<"$route")
    address=$(project "$key" address)
    builder direct "$home/credential" "tcp://$address" "$(field serverName <<<"$route")"
    mkdir -p "$home/context"
    cp "$PLACE/busybox/busybox" "$home/context/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' 'RUN ["/bin/busybox", "sleep", "20"]' >"$home/context/Dockerfile"

    _buildx direct build --builder by-hand --progress=plain "$home/context" >"$home/logs/build" 2>&1 &
    build=$!
    if ! await 60 grep -q '\[2/2\] RUN' "$home/logs/build"; then
        cat "$home/logs/build"
        die 1 "the build does not come to its RUN"
    fi
    look before
    kill -9 "$kilnd_pid"
    wait "$kilnd_pid" 2>/dev/null || true
    killed=$(now_ms)
    check "the build goes on without kilnd" kill -0 "$build"
    kilnd_start "$home/kiln.toml"
    figure "kill to answering again" "$(($(now_ms) - killed))" ms
    look after
    check "there was one lease" test "$(wc -w <<<"${before[lease]}")" -eq 1
    for said in daemon lease phase generation; do
        same "after kill -9 of kilnd: $said as before" "${before[$said]}" "${after[$said]}"
    done
    check "a restarted kilnd does not stop it under the build" refuses_stop "$key"

    wait "$build" || build_status=$?
    [[ $build_status -eq 0 ]] || cat "$home/logs/build"
    same "the build ends well" 0 "$build_status"
    figure "build went on after the restart" "$(($(now_ms) - killed))" ms
    check "for longer than the idle window" test $(($(now_ms) - killed)) -gt $((idle * 1000 + 1000))
    look after
    same "its daemon is the same" "${before[daemon]}" "${after[daemon]}"
    same "and warm" warm "${after[phase]}"

    check "its lease can be released" kiln complete "$key" "$(field buildId <<<"$route")"
    same "and is gone" '' "$(leases_of "$key")"
    check "then the idle window stops it" await $((idle + 40)) is_phase "$key" idle
}

look() {
    local -n _seen=$1
    _seen[daemon]=$(daemon_of "$key")
    _seen[lease]=$(leases_of "$key")
    _seen[phase]=$(project "$key" phase)
    _seen[generation]=$(project "$key" generation)
}

refuses_stop() {
    local words
    if words=$(kiln stop "$1" 2>&1); then return 1; fi
    says "$words" busy || { printf '%s\n' "$words" >&2; return 1; }
}

# === crowd

point_crowd() {
    local keys=20 clients=200 open answered
    [[ $runtime == process ]] || keys=5 clients=50
    if [[ -n $short ]]; then keys=$((keys * 2 / 5)) clients=$((keys * 10)); fi
    # A lease whose answer was lost on its last yard ends with the maximum age.
    kilnd_config "$home/kiln.toml" "$runtime" '[policy]
lease_grace = "90s"
max_build_age = "90s"
'"$ALONE"
    kilnd_start "$home/kiln.toml"
    mkdir -p "$home/answers"

    crowd first "$keys" "$clients" ''
    same "$clients first routes at once for $keys new keys: all answered" "$clients" "$(grep -c '^200 ' "$home/first" || true)"
    figure "the last of $clients answers" "$(slowest "$home/first")" s
    same "one daemon each" "$keys" "$(count_daemons)"
    same "one start each" "$keys of 1" "$(starts_each)"
    same "a lease each" "$clients" "$(all_leases)"
    release first
    check "all leases are released" await 20 no_leases

    stop_all
    same "all stopped" 0 "$(count_daemons)"
    open=$(open_files)
    crowd second "$keys" "$clients" hanging_up
    answered=$(grep -c '^200 ' "$home/second" || true)
    check "half of $clients clients hung up, the others were answered" test "$answered" -ge $((clients / 2))
    check "some did hang up before their answer" test "$answered" -lt "$clients"
    figure "clients that hung up" "$((clients - answered))" of\ "$clients"
    same "one daemon each" "$keys" "$(count_daemons)"
    same "two starts each by now" "$keys of 2" "$(starts_each)"
    release second
    # Released at once, but for answers that were in the kernel's hands when their client went.
    await 5 no_leases || figure "leases that end with their age, their answer lost on its last yard" "$(all_leases)" leases
    check "no lease is left behind" await 100 no_leases
    check "no connection either" no_connections
    # A daemon that runs is watched by one.
    check "no descriptor either" await 30 test_open_files $((open + keys + 8))
    crowd third "$keys" "$keys" ''
    same "the next routes work" "$keys" "$(grep -c '^200 ' "$home/third" || true)"
    same "on the same daemons" "$keys of 2" "$(starts_each)"
    release third
    stop_all
    same "and all stop" 0 "$(count_daemons)"
}

# crowd NAME KEYS CLIENTS HANGING_UP: a line `CODE SECONDS` a client in $home/NAME. With HANGING_UP each second client is
# killed within a second.
crowd() {
    local name=$1 keys=$2 clients=$3 hanging=$4 number pids=() patience
    mkdir -p "$home/answers/$name"
    for ((number = 0; number < clients; number++)); do
        patience=170
        # In turns with the keys, so that each key has both kinds.
        [[ -z $hanging || $((number / keys % 2)) -eq 0 ]] || patience=0.$((RANDOM % 90 + 10))
        # In a shell of its own, which would otherwise tell of each that was killed.
        { timeout --signal=KILL "$patience" curl --silent --unix-socket "$home/run/kiln.sock" http://kiln/route \
            --data "{\"repo\":\"example.com/crowd/$((number % keys))\",\"arch\":\"$(uname -m)\"}" \
            --output "$home/answers/$name/$number" --write-out '%{http_code} %{time_total}\n' \
            >"$home/answers/$name/$number.code" || true; } 2>/dev/null &
        pids+=("$!")
    done
    wait "${pids[@]}"
    cat "$home/answers/$name/"*.code >"$home/$name"
}

release() {
    local answer
    for answer in "$home/answers/$1/"*[0-9]; do
        # Whoever hung up has no whole answer.
        if grep -q '"buildId"' "$answer" && grep -q '}$' "$answer"; then
            kiln complete "$(sed -E 's/.*"key":"([^"]*)".*/\1/' "$answer")" "$(sed -E 's/.*"buildId":"([^"]*)".*/\1/' "$answer")"
        fi
    done
}

# "KEYS of STARTS" for each number of starts that keys have.
starts_each() { starts | awk '{ print $1 }' | sort -n | uniq -c | awk '{ print $1 " of " $2 }'; }

slowest() { awk '{ print $2 }' "$1" | sort -n | tail -n 1; }

open_files() { find "/proc/$kilnd_pid/fd" -mindepth 1 2>/dev/null | wc -l; }
test_open_files() { [[ $(open_files) -le $1 ]]; }

stop_all() {
    local key pids=()
    for key in $(kiln ps --json | sed -n 's/.*"key": "\([^"]*\)".*/\1/p'); do
        kiln stop "$key" >/dev/null &
        pids+=("$!")
    done
    for key in "${pids[@]}"; do wait "$key" || not_ok "kiln stop of all projects"; done
}

# === credentials

point_credentials() {
    local age=10 a b ours=$home/a theirs=$home/b address name route
    kilnd_config "$home/kiln.toml" "$runtime" "[policy]
lease_grace = \"${age}s\"
max_build_age = \"${age}s\""
    kilnd_start "$home/kiln.toml"
    # Both are up before a credential's clock starts.
    a=$(kiln route --repo example.com/credentials/a --json | field key)
    b=$(kiln route --repo example.com/credentials/b --json | field key)
    kiln route --repo example.com/credentials/b --credential "$theirs" --json >/dev/null
    route=$(kiln route --repo example.com/credentials/a --credential "$ours" --json)
    check "project A's credential opens A's daemon" asks "$ours" "$(project "$a" address)" "$(project "$a" serverName)"
    check "B's opens B's" asks "$theirs" "$(project "$b" address)" "$(project "$b" serverName)"
    address=$(project "$b" address) name=$(project "$b" serverName)
    # With B's authority, so that it is not the client that turns away.
    check "A's is refused by B's daemon" is_refused asks "$ours" "$address" "$name" "$theirs"
    check "also through the gateway" is_refused asks "$ours" "$(field endpoint <<<"$route" | sed 's,^tcp://,,')" "$name" "$theirs"
    check "a client without a certificate too" is_refused asks_without_certificate "$address" "$name" "$theirs"

    check "A's certificate ends with the maximum build age" await $((age + 5)) has_expired "$ours"
    check "and is refused by A's daemon from then on" is_refused asks "$ours" "$(project "$a" address)" "$(project "$a" serverName)"
    same "whose daemon is up" warm "$(project "$a" phase)"
    kiln route --repo example.com/credentials/a --credential "$ours" --json >/dev/null
    check "and which a new credential opens" asks "$ours" "$(project "$a" address)" "$(project "$a" serverName)"
}

has_expired() { ! openssl x509 -in "$1/cert.pem" -noout -checkend 0 >/dev/null; }

asks_without_certificate() {
    timeout 20 "$BUILDKIT_BIN/buildctl" --addr "tcp://$1" --tlsservername "$2" --tlscacert "$3/ca.pem" debug workers \
        >"$home/asked" 2>&1
}

# === fuzz

point_fuzz() {
    local line
    if "$KILN_ROOT/scripts/fuzz" 60 >"$home/fuzz"; then :; else cat "$home/fuzz"; fi
    while read -r line; do
        check "$line" grep -q 'no finding' <<<"$line"
    done < <(grep -E '(no finding|FAILED)' "$home/fuzz")
    check "every target ran" test "$(grep -c 'no finding' "$home/fuzz")" -eq "$(find "$KILN_ROOT/fuzz/fuzz_targets" -name '*.rs' | wc -l)"
}

# === warm

# What kilnd does to the host is seen in its system calls: programs it runs, connections it makes, requests it sends to
# Incus over connections that it has.
point_warm() {
    local repo=example.com/acceptance/warm key route try
    kilnd_config "$home/kiln.toml" "$runtime" "$ALONE"
    kilnd_start "$home/kiln.toml"
    route=$(kiln route --repo "$repo" --json)
    key=$(field key <<<"$route")
    # What kilnd does on its own account (a watch that is renewed) may fall into the trace. What a route does would be in each of them.
    for try in 1 2 3; do
        traced warm 100_routes "$repo"
        forget_the_watch "$home/trace-warm"
        grep -qE ' (execve|connect)\(| /1\.0' "$home/trace-warm" || break
        say "try $try saw: $(grep -hE ' (execve|connect)\(| /1\.0' "$home/trace-warm" | head -n 3)"
        [[ $try -eq 3 ]] || release routes
    done
    same "100 warm routes are answered" 100 "$(grep -c '^200' "$home/codes" || true)"
    same "no program is run for them" 0 "$(grep -c ' execve(' "$home/trace-warm" || true)"
    same "no connection is made" 0 "$(grep -c ' connect(' "$home/trace-warm" || true)"
    same "Incus is asked nothing" 0 "$(grep -c ' /1\.0' "$home/trace-warm" || true)"
    check "and their answers were seen" test "$(grep -c 'HTTP/1.1 200 OK' "$home/trace-warm" || true)" -ge 100
    release routes
    kiln complete "$key" "$(field buildId <<<"$route")"
    await 10 no_leases
    # That the trace shows what it should: a wake does ask the host.
    traced wake stop_and_wake "$key" "$repo"
    check "a wake does make connections" grep -q ' connect(' "$home/trace-wake"
    if [[ $runtime == process ]]; then
        check "and runs a program" grep -q ' execve(' "$home/trace-wake"
    else
        check "and asks Incus" grep -q ' /1\.0' "$home/trace-wake"
    fi
}

# Every few seconds the rules of the network are looked at, whether builds are routed or not; a hundred times it would be for them.
forget_the_watch() {
    [[ $(grep -cE ' execve\(.*"list", "table"' "$1") -lt 20 ]] || return 0
    sed -i -E '/ execve\(.*"list", "table"/d' "$1"
}

# traced NAME WORD...: the command, with kilnd's system calls in $home/trace-NAME.
traced() {
    local trace=$home/trace-$1 strace
    shift
    strace -f -e trace=execve,connect,write,writev,sendto,sendmsg -s 120 -o "$trace" -p "$kilnd_pid" 2>"$trace.said" &
    strace=$!
    await 10 grep -qs 'attached' "$trace.said" || die 1 "strace cannot look at kilnd: $(cat "$trace.said")"
    "$@"
    # Asked to end, it lets go of one thread after the other, and may wait for ever for one that never stops for it, with the rest
    # of kilnd held. Killed, it lets go of all.
    kill -INT "$strace" 2>/dev/null || true
    ended "$strace" 20 || kill -KILL "$strace" 2>/dev/null || true
    wait "$strace" || true
}

100_routes() {
    local number
    mkdir -p "$home/answers/routes"
    for ((number = 0; number < 100; number++)); do
        curl --silent --max-time 20 --unix-socket "$home/run/kiln.sock" http://kiln/route \
            --data "{\"repo\":\"$1\",\"arch\":\"$(uname -m)\"}" --output "$home/answers/routes/$number" \
            --write-out '%{http_code}\n' || true
    done >"$home/codes"
}

stop_and_wake() {
    kiln stop "$1" >/dev/null
    kiln route --repo "$2" --json >/dev/null
}

# === wake, route

point_wake() {
    local rounds=10 over
    [[ -z $short ]] || rounds=3
    kilnd_config "$home/kiln.toml" "$runtime"
    bench_program
    kiln_bench wake --config "$home/kiln.toml" --rounds "$rounds"
    figure "first creation" "$(sed -n 's/.*first creation \([0-9.]*\) ms.*/\1/p' "$home/bench")" ms
    figure "request to ready, p50" "$(awk '/request to ready/ { print $5 }' "$home/bench")" ms
    figure "bare start to answer, p50" "$(awk '/bare start to answer/ { print $6 }' "$home/bench")" ms
    over=$(sed -n 's/^over the floor: \([-0-9.]*\) ms.*/\1/p' "$home/bench")
    bar "wake over the bare floor" '50 ms' "$over ms" "$over <= 50"
    # A machine's noise is not half a second.
    check "a wake costs less than 500 ms over its floor" holds "$over < 500"
}

point_route() {
    local seconds=4 clients=1,16,64 disk projects number rate p50 p99 cpu
    [[ -z $short ]] || seconds=1 clients=1,64
    bench_program
    kiln_bench route --dir "$PLACE" --seconds "$seconds" --clients "$clients" --projects 1,1000
    disk=$(sed -n 's/^bare fdatasync: p50 \([0-9.]*\) ms.*/\1/p' "$home/bench")
    figure "bare fdatasync, p50" "$disk" ms
    while read -r projects number rate p50 p99 cpu _; do
        figure "$projects projects, $number clients: routes" "$rate" "per second"
        figure "$projects projects, $number clients: p50" "$p50" ms
        figure "$projects projects, $number clients: p99" "$p99" ms
        figure "$projects projects, $number clients: CPU" "$cpu" "us per route"
        case $number in
            1) bar "p50 of 1 client over a bare fdatasync" '0.3 ms' "$p50 - $disk ms" "$p50 - $disk <= 0.3" ;;
            64)
                bar "routes per second of 64 clients" 5000 "$rate" "$rate >= 5000"
                bar "p99 of 64 clients" '20 ms' "$p99 ms" "$p99 <= 20"
                bar "CPU per route" '200 us' "$cpu us" "$cpu <= 200"
                ;;
        esac
        check "$projects projects, $number clients: routes were answered" holds "$rate > 0"
    done < <(awk '$1 ~ /^[0-9]+$/ && NF == 7' "$home/bench")
    check "every row is there" test "$(awk '$1 ~ /^[0-9]+$/ && NF == 7' "$home/bench" | wc -l)" -ge 4
}

# An optimised kiln for the long run. The short one uses what is there, and its figures show only that nothing is absurd.
bench_program() {
    bench=$KILN_BIN/kiln
    if [[ -n $short ]]; then return 0; fi
    (cd -- "$KILN_ROOT" && cargo build --locked --release --bin kiln >&2)
    bench=$(dirname -- "$KILN_BIN")/release/kiln
}

kiln_bench() {
    if ! timeout 300 "$bench" bench "$@" >"$home/bench" 2>"$home/bench.said"; then
        cat "$home/bench" "$home/bench.said"
        die 1 "kiln bench $1 failed: its words are above"
    fi
}

holds() { awk "BEGIN { exit !($1) }"; }

# A bar that noise of the machine can break is told, and fails nothing. bar NAME BAR SEEN CONDITION
bar() {
    local word=met
    holds "$4" || word='NOT MET'
    [[ -z $short ]] || word+=' (unoptimised)'
    printf 'bar: %s: %s, seen: %s: %s\n' "$point${runtime:+ ($runtime)}: $1" "$2" "$3" "$word"
}

# === house

point_house() {
    local folder missing=()
    for folder in "$KILN_ROOT"/crates/*/ "$KILN_ROOT"/src/*/; do
        folder=${folder#"$KILN_ROOT/"}
        grep -qF -- "\`${folder%/}" "$KILN_ROOT/docs/architecture.md" || missing+=("${folder%/}")
    done
    same "docs/architecture.md names each folder of crates and src" '' "${missing[*]}"
    missing=()
    # shellcheck disable=SC2016  # these are backticks of Markdown
    while read -r folder; do
        [[ -e $KILN_ROOT/$folder ]] || missing+=("$folder")
    done < <(grep -oE '`(crates|src|packaging)/[^`]*`' "$KILN_ROOT/docs/architecture.md" | tr -d '`' | sort -u)
    same "and what it names is there" '' "${missing[*]}"
}
