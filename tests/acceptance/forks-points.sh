# shellcheck shell=bash
# shellcheck disable=SC2154  # kilnd_pid, hello_status and so on come from scripts/lib/kilnd.sh, the rest from harness.sh
# The points of caches that are about forks and members. Each runs in a shell of its own that has: point, its name; runtime,
# `process` or `incus`; home, an empty directory; short, not empty for the short run. Source this file after caches-points.sh.

# asked NAME JSON: a route, answered into $home/answers/NAME. -> asked_status, asked_ms
asked() {
    local said
    mkdir -p "$home/answers"
    said=$(curl --silent --max-time $((120 * ${KILN_PATIENCE:-1})) --unix-socket "$home/run/kiln.sock" http://kiln/route --data "$2" \
        --output "$home/answers/$1" --write-out '%{http_code} %{time_total}' || true)
    asked_status=${said% *}
    asked_ms=$(awk -v s="${said#* }" 'BEGIN { printf "%d", s * 1000 }')
}

# request REPO [jq's own words for more]
request() { jq -nc --arg repo "$1" --arg arch "$(uname -m)" "{repo: \$repo, arch: \$arch} + ${2:-{\}}"; }

# asked_fork NAME REPO PULL_REQUEST
asked_fork() { asked "$1" "$(request "$2" "{untrusted: true, pullRequest: \"$3\", credential: true}")"; }

answer() { jq -r "$2 // empty" "$home/answers/$1"; }

# give_back NAME: the lease of an answer.
give_back() { kiln complete "$(answer "$1" .key)" "$(answer "$1" .buildId)"; }

# fork_hello NAME REPO PULL_REQUEST [FLAG...]
fork_hello() {
    local name=$1 repo=$2 pull=$3
    shift 3
    KILN_UNTRUSTED=1 KILN_PULL_REQUEST=$pull hello "$name" "$repo" "$@"
}

quickest() { sort -n | head -n 1; }

median() { sort -n | awk '{ v[NR] = $1 } END { if (NR) print (NR % 2) ? v[(NR + 1) / 2] : int((v[NR / 2] + v[NR / 2 + 1]) / 2) }'; }

# === fork

point_fork() {
    local repo=example.com/caches/fork key least=9 most=9 rounds=0 call over status=0 route
    local limit=$((500 * ${KILN_PATIENCE:-1}))
    [[ -z $short ]] || least=3
    caches_config ''
    kilnd_start "$home/kiln.toml"
    hello first "$repo"
    same "a first build of the parent" 0 "$hello_status"
    routed "$repo" --credential "$home/credential"
    # What Kiln does for the past of the parent is done by then.
    check "its first snapshot is good" await 60 has_good "$key"
    own_build "$key" $((most * 30)) '/bin/busybox sleep 0.3; echo x >>/written'

    : >"$home/bare" && : >"$home/forked"
    printf '\0\0\0\0\0' >"$home/nothing"
    call=$(for _ in 1 2 3 4 5 6 7; do bare_call; done | median)
    # What else the machine does adds to each round, and to the quickest the least: where it does much, it takes more of them.
    until [[ $rounds -ge $most ]] || { [[ $rounds -ge $least ]] && holds "$over < $limit"; }; do
        asked_fork "f$rounds" "$repo" "$rounds"
        [[ $asked_status == 200 ]] || die 1 "no fork: $asked_status $(cat "$home/answers/f$rounds")"
        echo "$asked_ms" >>"$home/forked"
        bare_fork "$rounds" "f$rounds" >>"$home/bare"
        rounds=$((rounds + 1))
        over=$(($(quickest <"$home/forked") - $(quickest <"$home/bare") + 5 * call))
    done
    check "the parent was at work all the time" kill -0 "$own_build_pid"
    figure "fork of a running daemon: request to ready, median of $rounds" "$(median <"$home/forked")" ms
    figure "bare snapshot, create, start, ListWorkers, median of $rounds" "$(median <"$home/bare")" ms
    figure "requests to ready" "$(tr '\n' ' ' <"$home/forked")" ms
    figure "bare" "$(tr '\n' ' ' <"$home/bare")" ms
    figure "the programs that the bare way is made of, of that" "$((5 * call))" ms
    figure "the quickest fork over the quickest bare one" "$over" ms
    check "a fork costs less than $limit ms over its floor" holds "$over < $limit"
    over=$(($(median <"$home/forked") - $(median <"$home/bare") + 5 * call))
    bar "fork over the bare floor" '50 ms' "$over ms" "$over <= 50"

    fork_hello of-fork "$repo" 0
    same "the first build of a fork" 0 "$hello_status"
    same "is all cached" "$hello_steps" "$hello_cached"
    figure "first build of a fork" "$hello_ms" ms
    end_own_build "$key"
    wait "$own_build_pid" || status=$?
    [[ $status -eq 0 ]] || tail -n 5 "$home/logs/own-$key"
    same "the parent's build ends well" 0 "$status"
    same "forks of different pull requests have different keys" "$rounds" "$(cat "$home"/answers/f? | jq -r .key | sort -u | wc -l)"
    completes "$key" "$route"
    while [[ $rounds -gt 0 ]]; do
        rounds=$((rounds - 1))
        give_back "f$rounds"
    done
}

bare_api() { curl --silent --max-time 60 --unix-socket "$(incus_directory)/unix.socket" "$@"; }

bare_call() {
    local started
    started=$(now_us)
    bare_api http://incus/1.0 >/dev/null
    echo $((($(now_us) - started) / 1000))
}

now_us() { echo "${EPOCHREALTIME/[.,]/}"; }

# bare_fork NUMBER ANSWER: what a fork is at the least, by hand: an instance like that of the answer on a snapshot of the
# parent's cache. Prints the milliseconds.
bare_fork() {
    local instance=bare-$1 address=10.$KILN_RANGE.250.$((10 + $1)) like fork name files cache operation started part answer=$2
    fork=$(answer "$answer" .key)
    like=$(incus_of_place list --project kiln --columns n --format csv | grep -F -- "$fork")
    files=$home/$instance-files cache=$(dirname -- "$(volumes_root)")/$instance
    [[ -z ${KILN_DATASET:-} ]] || cache+=/cache
    cp -a "$home/state/daemons/$fork" "$files"
    sed -i -E "s,tcp://[0-9.]+:,tcp://$address:,g" "$files/buildkitd.toml"
    bare_api "http://incus/1.0/instances/$like?project=kiln" >"$home/$instance.like"
    jq -c --arg name "$instance" --arg address "$address" --arg files "$files" --arg cache "$cache" --arg nic "kb$1" '.metadata
        | {name: $name, type: "container", profiles: [], source: {type: "image", alias: "kiln"},
           config: (.config | with_entries(select(.key | test("^(volatile|image|user)\\.") | not))),
           devices: (.devices | .cache.source = $cache | .files.source = $files
               | .eth0["ipv4.address"] = $address | .eth0.host_name = $nic | del(.eth0.hwaddr))}' \
        "$home/$instance.like" >"$home/$instance.json"
    name=$(answer "$answer" .serverName)
    mkdir -p "$home/credential-$answer"
    for part in ca cert key; do jq -r ".credential.$part" "$home/answers/$answer" >"$home/credential-$answer/$part.pem"; done
    started=$(now_ms)
    bare_copy "$instance" "$(cache_of "$key")" "$cache"
    operation=$(bare_api "http://incus/1.0/instances?project=kiln" --data "@$home/$instance.json" | sed -E 's/.*"operation":"([^"]*)".*/\1/')
    bare_api "http://incus$operation/wait" >"$home/$instance.made"
    operation=$(bare_api --request PUT "http://incus/1.0/instances/$instance/state?project=kiln" --data '{"action":"start"}' |
        sed -E 's/.*"operation":"([^"]*)".*/\1/')
    bare_api "http://incus$operation/wait" >"$home/$instance.started"
    # Without a program for each look, as long as nobody listens.
    until (exec 7<>"/dev/tcp/$address/8372") 2>/dev/null && lists_workers "$address" "$answer" "$name"; do
        [[ $(now_ms) -lt $((started + 30000 * ${KILN_PATIENCE:-1})) ]] || die 1 "a bare fork does not answer: $(cat "$home/$instance.made" "$home/$instance.started")"
    done
    echo $(($(now_ms) - started))
    incus_of_place delete --force --project kiln "$instance" >&2
    bare_copy_remove "$instance" "$cache" >&2
}

# bare_copy NAME FROM TO
bare_copy() {
    local set
    if [[ -z ${KILN_DATASET:-} ]]; then btrfs -q subvolume snapshot "$2" "$3"; return; fi
    set=$KILN_DATASET/${home##*/}
    zfs snapshot "$set/live/$key@$1"
    zfs clone -o "mountpoint=$(dirname -- "$3")" "$set/live/$key@$1" "$set/$1"
}

bare_copy_remove() {
    local set
    if [[ -z ${KILN_DATASET:-} ]]; then btrfs -q subvolume delete "$2"; return; fi
    set=$KILN_DATASET/${home##*/}
    zfs destroy "$set/$1"
    zfs destroy "$set/live/$key@$1"
}

# lists_workers ADDRESS ANSWER NAME: the daemon at the address answers the call, with the answer's credential.
lists_workers() {
    local dir=$home/credential-$2 name=$3
    [[ $(curl --silent --max-time 5 --http2 --cacert "$dir/ca.pem" --cert "$dir/cert.pem" --key "$dir/key.pem" \
        --resolve "$name:8372:$1" --header 'content-type: application/grpc' --header 'te: trailers' --data-binary "@$home/nothing" \
        --output /dev/null --write-out '%{http_code}' "https://$name:8372/moby.buildkit.v1.Control/ListWorkers") == 200 ]]
}

# === pulls

point_pulls() {
    local repo=example.com/caches/pulls key in_turn=50 at_once=8 number said pids=() slow
    if [[ -n $short ]]; then in_turn=4 at_once=4; fi
    caches_config 'fork_idle_window = "1s"'
    kilnd_start "$home/kiln.toml"
    hello first "$repo"
    same "a first build of the project" 0 "$hello_status"
    key=$(kiln key --repo "$repo")
    check "its first snapshot is good" await 60 has_good "$key"
    await 20 no_trial || true
    inventory >"$home/before"

    : >"$home/took"
    for ((number = 1; number <= in_turn; number++)); do
        fork_hello "turn-$number" "$repo" "$number"
        echo "$hello_ms" >>"$home/took"
        echo "$hello_status $((hello_steps - hello_cached))" >>"$home/turns"
        [[ $hello_status -eq 0 ]] || tail -n 5 "$hello_log"
    done
    same "$in_turn pull requests in turn: all build, all cached" "$in_turn 0 0" "$(uniq_of "$home/turns")"
    figure "one after another: route, build, release, median" "$(median <"$home/took")" ms
    for ((number = 1; number <= at_once; number++)); do
        {
            fork_hello "once-$number" "$repo" "o$number"
            echo "$hello_status $((hello_steps - hello_cached))" >"$home/once-$number.result"
            echo "$hello_ms" >"$home/once-$number.ms"
        } &
        pids+=("$!")
    done
    wait "${pids[@]}" || true
    same "$at_once at once: all build, all cached" "$at_once 0 0" "$(cat "$home"/once-*.result | sort | uniq -c | sed 's/^ *//')"
    slow=$(cat "$home"/once-*.ms | sort -n | tail -n 1)
    figure "the slowest of $at_once at once" "$slow" ms

    said=$(now_ms)
    check "everything is gone again" await 90 is_as_before
    figure "the last release to nothing left" "$(($(now_ms) - said))" ms
    inventory >"$home/after"
    for said in instance volume snapshot trash row interface element files process mount; do
        same "no $said is left" "$(grep "^$said " "$home/before" || true)" "$(grep "^$said " "$home/after" || true)"
    done
    same "nothing lost its other half" '[]' "$(kiln orphans --json)"
    same "forks had keys of their own" $((in_turn + at_once)) "$(kiln events --json | grep '"kind":"cloned"' | sed -n 's/.*"key":"\([^"]*\)".*/\1/p' | sort -u | wc -l)"
}

uniq_of() { sort "$1" | uniq -c | sed 's/^ *//'; }

is_as_before() { inventory >"$home/now" && cmp -s "$home/before" "$home/now"; }

no_trial() { ! incus_of_place list --project kiln --columns n --format csv | grep -q 'kiln-t\|-tp'; }

# inventory: a line for each thing there is, in an order of their own.
inventory() {
    local volumes
    volumes=$(volumes_root)
    {
        incus_of_place list --project kiln --columns n --format csv | sed 's/^/instance /'
        find "$volumes/live" -mindepth 1 -maxdepth 1 -printf 'volume %f\n'
        if [[ -n ${KILN_DATASET:-} ]]; then
            zfs list -H -r -t snapshot -o name "$KILN_DATASET/${home##*/}" | sed 's/^/snapshot /'
            zfs list -H -r -o name "$KILN_DATASET/${home##*/}" | sed -n 's,.*/trash/,trash ,p'
        else
            find "$volumes/live" -mindepth 3 -maxdepth 3 -path '*/snapshots/*' -printf 'snapshot %P\n'
            find "$volumes/trash" -mindepth 1 -maxdepth 1 -printf 'trash %f\n'
        fi
        kiln ps --json | jq -r '.[] | "row " + .key + " " + .address'
        ip -o link show | sed -nE 's/^[0-9]+: (kiln0a5d[^@:]*).*/interface \1/p'
        nft -j list table inet "$KILN_TABLE" | jq -r '.nftables[].set? | select(.name == "trusted" or .name == "untrusted")
            | .name as $set | .elem // [] | .[] | "element " + $set + " " + .'
        find "$home/state" "$home/run" -mindepth 2 -maxdepth 2 -type d -printf 'files %P of %H\n'
        daemons | sed 's/^/process /'
        awk -v dir="$PLACE/" 'index($5, dir) == 1 { print "mount " $5 }' /proc/self/mountinfo
    } | sort
}

# === spread

point_spread() {
    local repo=example.com/caches/spread key number took
    caches_config 'fork_idle_window = "1s"
idle_window = "5s"
idle_longest = "5s"' "$(if knows fan_out; then printf '[fan_out]\nbuilds = 4\nmembers = 2\n'; fi)"
    kilnd_start "$home/kiln.toml"
    writes first "$repo" 1
    key=$(kiln key --repo "$repo")
    kiln set "$key" --tier hot >/dev/null

    # Six leases, and what came where.
    for number in 1 2 3 4 5 6; do
        asked "l$number" "$(request "$repo" "{branch: \"branch-$number\"}")"
        same "lease $number of six is answered" 200 "$asked_status"
    done
    same "the daemon takes as many as it may" 4 "$(cat "$home"/answers/l? | jq -r .key | grep -c "^$key$" || true)"
    same "and a second one the others" "c1$key" "$(cat "$home"/answers/l? | jq -r .key | grep -v "^$key$" | sort -u)"
    give_back l6
    asked again "$(request "$repo" '{branch: "branch-6"}')"
    same "a branch goes where it went" "$(answer l6 .key)" "$(answer again .key)"
    give_back l2
    asked moved "$(request "$repo" '{branch: "branch-5"}')"
    same "also when another one has less to do" "$(answer l5 .key)" "$(answer moved .key)"
    for number in l1 l3 l4 l5 again moved; do give_back "$number"; done
    check "everything is gone when it is quiet" await 60 has_no_members "$key"
    check "with its volume" test ! -e "$(dirname -- "$(cache_of "c1$key")")"

    spread_builds with
    figure "six builds at once with fan-out" "$took" ms
    check "more than one daemon built them" test "$(keys_of_builds | sort -u | wc -l)" -gt 1
    check "everything is gone when it is quiet" await 60 has_no_members "$key"
    if knows fan_out; then
        kilnd_stop
        sed -i 's/^members = 2/members = 0/' "$home/kiln.toml"
        kilnd_start "$home/kiln.toml"
        spread_builds without
        figure "six builds at once without" "$took" ms
    fi
    same "nothing lost its other half" '[]' "$(kiln orphans --json)"
}

has_no_members() { [[ $(kiln ps --json | jq -r '.[].key') == "$1" ]]; }

# The keys that had a lease of one of the last builds.
keys_of_builds() { jq -r '.[] | select(.leases | length > 0) | .key' "$home/logs/ps-with"; }

has_leases() { kiln ps --json >"$home/leases" && [[ $(jq '[.[].leases | length] | add' "$home/leases") -ge $1 ]]; }

# spread_builds NAME -> took
spread_builds() {
    local number pids=() started rounds=400000
    [[ -z $short ]] || rounds=200000
    mkdir -p "$home/context-$1"
    cp "$PLACE/busybox/busybox" "$home/context-$1/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' 'ARG WHO' \
        "RUN [\"/bin/busybox\", \"sh\", \"-c\", \"echo $1 \$WHO; /bin/busybox seq 1 $rounds | /bin/busybox sort -r -n | /bin/busybox md5sum\"]" >"$home/context-$1/Dockerfile"
    started=$(now_ms)
    for number in 1 2 3 4 5 6; do
        mkdir -p "$home/client-$1-$number"
        HOME=$home/client-$1-$number KILN_BUILDX=$BUILDKIT_BIN/buildx KILN_BRANCH=b$number kiln build --repo "$repo" --build-arg "WHO=$number" \
            --progress=plain "$home/context-$1" </dev/null >"$home/logs/spread-$1-$number" 2>&1 &
        pids+=("$!")
    done
    # Leases are there before anything is built.
    await 20 has_leases 6 || not_ok "six builds have a lease each ($1)"
    cp "$home/leases" "$home/logs/ps-$1"
    for number in "${!pids[@]}"; do
        wait "${pids[$number]}" || { not_ok "build $((number + 1)) of six ($1)"; tail -n 5 "$home/logs/spread-$1-$((number + 1))"; }
    done
    took=$(($(now_ms) - started))
}
