# shellcheck shell=bash
# shellcheck disable=SC2154  # kilnd_pid, hello_status and so on come from scripts/lib/kilnd.sh, the rest from harness.sh
# The points of caches that are about one cache: its past, damage, its size. Each runs in a shell of its own that has: point,
# its name; runtime, `process` or `incus`; home, an empty directory; short, not empty for the short run. Source this file after
# heart-points.sh.

# === What the points look at

# caches_config POLICY [MORE]: with lines of the policy, and sections. -> $home/kiln.toml
caches_config() {
    kilnd_config "$home/kiln.toml" "$runtime" "[policy]
$1
${2:-}"
}

# Where a point has storage of its own, `at` says where.
at=''

volumes_root() {
    if [[ -n $at ]]; then echo "$at"
    elif [[ $runtime == process ]]; then echo "$home/volumes"
    elif [[ -n ${KILN_DATASET:-} ]]; then echo "$PLACE/zfs/${home##*/}"
    else echo "$PLACE/btrfs/${home##*/}"
    fi
}

cache_of() { echo "$(volumes_root)/live/$1/cache"; }

# verdicts KEY: a line `NAME VERDICT` a snapshot.
verdicts() { kiln cache log "$1" --json | jq -r '.[] | .name + " " + .verdict'; }

has_good() { verdicts "$1" | grep -q ' good$'; }

newest() { verdicts "$1" | tail -n 1 | cut -d' ' -f1; }

is_good() { verdicts "$1" | grep -qx "$2 good"; }

trash_of() { kiln trash ls --json | jq -r --arg key "$1" '.[] | select(.name | startswith($key)) | .name'; }

# rounds NAME: what a build's cache mount remembers, as one line.
rounds() { sed -n 's/^built in the \(.*\) round$/\1/p' "$home/out-$1/greeting.txt" | tr '\n' ' ' | sed 's/ $//'; }

# built NAME REPO ROUND: a build that writes down its round, and is released.
built() {
    hello "$1" "$2" --build-arg "ROUND=$3"
    [[ $hello_status -eq 0 ]] || tail -n 20 "$hello_log"
    same "a build in the $3 round" 0 "$hello_status"
}

rests() { await 10 is_quiet "$1" && kiln stop "$1" >/dev/null; }

# writes NAME REPO MIB: a build with one step, which leaves so much in the cache. -> as of hello
writes() {
    local client=$home/client-$1 context=$home/context-$1
    hello_status=0 hello_log=$home/logs/$1
    mkdir -p "$client" "$context"
    cp "$PLACE/busybox/busybox" "$context/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' \
        "RUN [\"/bin/busybox\", \"dd\", \"if=/dev/urandom\", \"of=/written\", \"bs=1M\", \"count=$3\"]" >"$context/Dockerfile"
    HOME=$client KILN_BUILDX=$BUILDKIT_BIN/buildx kiln build --repo "$2" --progress=plain "$context" </dev/null >"$hello_log" 2>&1 ||
        hello_status=$?
    count_steps "$hello_log"
}

# refused_with WORD WORD...: the command fails, and says the word. Its words are in $home/refused.
refused_with() {
    local word=$1
    shift
    if "$@" >"$home/refused" 2>&1; then return 1; fi
    grep -q -- "$word" "$home/refused" || { sed 's/^/    it says: /' "$home/refused"; return 1; }
}

# === history

point_history() {
    local repo=example.com/caches/history key first second before kept
    caches_config ''
    kilnd_start "$home/kiln.toml"
    key=$(kiln key --repo "$repo")
    built one "$repo" one
    # A daemon that runs may always write.
    rests "$key"
    check "kiln cache snapshot" kiln cache snapshot "$key"
    first=$(newest "$key")
    check "kiln cache log has it" grep -qF -- "$first" <<<"$(kiln cache log "$key")"
    check "it is found to be good" await 90 is_good "$key" "$first"
    # Plain directories cannot tell.
    [[ $runtime == process ]] ||
        same "nothing was written since, and none is taken" "$first" "$(kiln cache snapshot "$key" --json | jq -r .name)"
    built two "$repo" two
    same "the cache remembers both builds" 'one two' "$(rounds two)"
    rests "$key"
    second=$(kiln cache snapshot "$key" --json | jq -r .name)
    check "a second snapshot is another" test "$second" != "$first"
    check "kiln cache usage measures" test "$(kiln cache usage "$key" --json | jq '.used + .shared')" -gt 1000000
    kiln cache usage "$key" | sed 's/^/    /'
    kiln du | sed 's/^/    /'
    check "kiln du lists it" grep -qF -- "$key" <<<"$(kiln du)"

    before=$(now_ms)
    check "kiln cache rollback KEY @SNAPSHOT" kiln cache rollback "$key" "@$first"
    figure "rollback" "$(($(now_ms) - before))" ms
    kept=$(trash_of "$key")
    check "what it was is in the trash" test -n "$kept"
    check "the journal says so" happened 'has gone back to'
    built three "$repo" three
    same "the cache is as it was then" 'one three' "$(rounds three)"
    rests "$key"
    check "kiln cache rollback without a name goes to the newest good one" kiln cache rollback "$key"
    check "kiln cache reset" kiln cache reset "$key"
    same "there is nothing to go back to" '' "$(verdicts "$key")"
    hello anew "$repo" --build-arg ROUND=four
    same "a build after it" 0 "$hello_status"
    same "finds nothing" "0 four" "$hello_cached $(rounds anew)"
    rests "$key"
    kiln rm "$key" >/dev/null
    check "kiln trash restore gives back what was replaced first" kiln trash restore "$kept"
    built back "$repo" five
    same "with all it had" 'one two five' "$(rounds back)"
    check "and the snapshots that were newer" grep -q "^$second " <<<"$(verdicts "$key")"
}

# === damage

point_damage() {
    local what repo key good
    caches_config ''
    kilnd_start "$home/kiln.toml"
    for what in database content; do
        repo=example.com/caches/damage-$what key=$(kiln key --repo "example.com/caches/damage-$what")
        hello "first-$what" "$repo"
        same "$what: a first build" 0 "$hello_status"
        rests "$key"
        kiln cache snapshot "$key" >/dev/null
        good=$(newest "$key")
        check "$what: its snapshot is good" await 90 is_good "$key" "$good"
        "damage_$what" "$(cache_of "$key")" || { not_ok "$what: there is something to damage"; continue; }
        hello "second-$what" "$repo"
        same "$what: the next build" 0 "$hello_status"
        [[ $hello_status -eq 0 ]] || tail -n 20 "$hello_log"
        same "$what: finds all in its cache" "$hello_steps" "$hello_cached"
        figure "$what: the build with the way back" "$hello_ms" ms
        check "$what: an event tells what is damaged" event_of "$key" cache-damaged .
        check "$what: and where it went back to" event_of "$key" rollback "$good"
        check "$what: the log says so, loudly" grep -q "ERROR.*damaged and has gone back.*$key" "$home/logs/kilnd"
        check "$what: the damaged one is in the trash" test -n "$(trash_of "$key")"
        kiln events --json | jq -r --arg key "$key" 'select(.key == $key and (.kind == "cache-damaged" or .kind == "rollback")) | "    " + .kind + ": " + .text' | cut -c1-300
        check "$what: kiln cache log still has it" is_good "$key" "$good"
        # Once, and not again and again.
        rests "$key"
        hello "third-$what" "$repo"
        same "$what: the build after that is as any" "0 $hello_steps" "$hello_status $hello_cached"
        same "$what: it went back once" 1 "$(kiln events --json | jq -r --arg key "$key" 'select(.key == $key and .kind == "rollback") | .id' | wc -l)"
    done
}

event_of() { kiln events --json | jq -r --arg key "$1" --arg kind "$2" 'select(.key == $key and .kind == $kind) | .text' | grep -q -- "$3"; }

damage_database() {
    local file
    file=$(find "$1" -name 'containerdmeta.db' -print -quit)
    [[ -s $file ]] && truncate -s $(($(stat -c %s "$file") / 2)) "$file"
}

# Bytes in the middle of the largest blob are others; its length and its time are as before.
damage_content() {
    local file size
    read -r size file < <(find "$1" -path '*/content/blobs/sha256/*' -type f -printf '%s %p\n' | sort -rn | head -n 1) || true
    [[ -n $file ]] || return 1
    printf 'damaged!' | dd of="$file" bs=1 seek=$((size / 2)) conv=notrunc status=none
    touch -d '2020-01-01' "$file"
}

# === refused

point_refused() {
    local repo=example.com/caches/refused key other mine theirs answer
    caches_config ''
    kilnd_start "$home/kiln.toml"
    key=$(kiln key --repo "$repo") other=$(kiln key --repo "$repo-other")
    writes mine "$repo" 1
    writes theirs "$repo-other" 1
    for theirs in "$key" "$other"; do
        rests "$theirs"
        kiln cache snapshot "$theirs" >/dev/null
    done
    mine=$(newest "$key")
    # One more of the other's: of that name this one has none.
    writes theirs-2 "$repo-other" 2
    rests "$other"
    theirs=$(kiln cache snapshot "$other" --json | jq -r .name)
    check "a rollback to no snapshot" refused_with 'has no snapshot' kiln cache rollback "$key" @kiln-999999
    check "it says which there are" grep -qF -- "$mine" "$home/refused"
    check "a rollback to another project's" refused_with 'has no snapshot' kiln cache rollback "$key" "@$theirs"
    check "a rollback to what is no name" refused_with . kiln cache rollback "$key" @../../etc
    check "a rollback of a project that is none" refused_with p000000000000dead kiln cache rollback p000000000000dead "@$mine"
    same "nothing of it went to the trash" '' "$(trash_of "$key")"

    routed "$repo"
    check "a rollback under a build" refused_with busy kiln cache rollback "$key" "@$mine"
    check "a reset under a build" refused_with busy kiln cache reset "$key"
    completes "$key" "$route"

    check "a pull request of a trusted build" refused_with untrusted curl_route "{\"repo\":\"$repo\",\"arch\":\"amd64\",\"pullRequest\":\"7\"}"
    if [[ $runtime == process ]]; then
        check "an untrusted build where nothing keeps it apart" refused_with 403 curl_route "{\"repo\":\"$repo\",\"arch\":\"amd64\",\"untrusted\":true,\"pullRequest\":\"7\"}"
        sed 's/^/    /' "$home/refused"
        return 0
    fi
    # One whose project has no cache: its first build is no reason to refuse it.
    KILN_UNTRUSTED=1 KILN_PULL_REQUEST=1 writes orphan "$repo-unknown" 1
    same "a fork without a parent builds" 0 "$hello_status"
    same "from nothing" 0 "$hello_cached"
    check "and its project has no cache for it" test ! -e "$(cache_of "$(kiln key --repo "$repo-unknown")")"

    # A directory that is not ours, where a cache should come.
    answer=$(kiln key --repo "$repo-foreign")
    mkdir -p "$(cache_of "$answer")"
    echo precious >"$(cache_of "$answer")/file"
    writes foreign "$repo-foreign" 1
    check "a volume that is not ours is refused" test "$hello_status" -ne 0
    same "and not touched" precious "$(cat "$(cache_of "$answer")/file")"
    tail -n 3 "$hello_log" | sed 's/^/    /'
    rm -rf -- "$(volumes_root)/live/${answer:?}"
}

curl_route() {
    local code
    code=$(curl --silent --max-time $((60 * ${KILN_PATIENCE:-1})) --unix-socket "$home/run/kiln.sock" http://kiln/route --data "$1" --output "$home/said" --write-out '%{http_code}')
    echo "$code $(cat "$home/said")"
    [[ $code == 2* ]]
}

# === full

# A disk of its own, small. What fills it is a file beside the caches.
point_full() {
    if [[ -n ${KILN_DATASET:-} ]]; then
        skip "a pool that is nearly full: a file in the way fills a btrfs, not a pool"
        return 0
    fi
    if ! knows eviction; then
        skip "storage that is nearly full: this kilnd evicts nothing"
        return 0
    fi
    local repo=example.com/caches/full name key leased total used status=0
    local -A keys
    mkdir -p "$home/disk"
    truncate -s 2G "$home/disk.img"
    mkfs.btrfs -q "$home/disk.img" >/dev/null
    mount -o loop "$home/disk.img" "$home/disk"
    caches_config 'fork_idle_window = "10m"' '[eviction]
begin = 90
end = 80
keep_newer = "1s"'
    mkdir -p "$home/disk/volumes"
    sed -i "s,^path = \"$PLACE/btrfs.*,path = \"$home/disk/volumes\"," "$home/kiln.toml"
    at=$home/disk/volumes
    kilnd_start "$home/kiln.toml"
    for name in thrown leased hot old middle new; do
        keys[$name]=$(kiln key --repo "$repo-$name")
        writes "$name" "$repo-$name" 120
        same "a build of $name" 0 "$hello_status"
        case $name in
            hot) kiln set "${keys[hot]}" --tier hot >/dev/null ;;
            leased) ;;
            thrown) await 10 is_quiet "${keys[thrown]}" && kiln rm "${keys[thrown]}" >/dev/null ;;
            *) rests "${keys[$name]}" ;;
        esac
    done
    routed "$repo-leased" --credential "$home/credential"
    leased=$route
    fork_hello fork "$repo-leased" 1
    same "a build of a fork" 0 "$hello_status"
    own_build "${keys[leased]}" 200 '/bin/busybox sleep 0.5'

    sync
    # As Kiln counts, and df: what the file system keeps for itself is not to be had.
    read -r used total < <(df --output=used,avail -B1 "$home/disk" | awk 'END { print $1, $1 + $2 }')
    kiln du | sed 's/^/    /'
    fallocate -l $((total * 96 / 100 - used)) "$home/disk/others"
    sync
    figure "full to" "$(fullness)" %
    # Which has room made at once, and not with the next look.
    check "no new cache is made" refused_with '% full' curl_route "{\"repo\":\"$repo-never\",\"arch\":\"$(uname -m)\"}"
    check "idle caches are evicted until there is room" await 180 has_room 81
    figure "now full to" "$(fullness)" %
    kiln events --json | jq -r 'select(.kind == "evicted" or .kind == "purged") | "    " + .kind + " " + (.key // "") + ": " + .text'
    kiln du | sed 's/^/    /'
    same "the trash went first, the fork, and then what nobody has used for longest" "thrown fork old middle" "$(order_of_going)"
    for name in leased hot new; do check "$name is not touched" test -d "$(cache_of "${keys[$name]}")"; done
    for name in old middle; do check "$name is gone" test ! -d "$(cache_of "${keys[$name]}")"; done
    check "kiln why says what became of it" explained "${keys[old]}" evicted
    check "kiln du tells how full it is" grep -q '% full' <<<"$(kiln du)"
    end_own_build "${keys[leased]}"
    wait "$own_build_pid" || status=$?
    same "the build that was under way ends well" 0 "$status"
    completes "${keys[leased]}" "$leased"
    writes again "$repo-old" 1
    same "a build of what was evicted" 0 "$hello_status"
    check "a size below the least is refused" refused_with volume kiln set "${keys[new]}" --volume 1MiB
}

end_full() { kilnd_stop; ! mountpoint -q "$home/disk" || umount -l "$home/disk"; }

knows() { "$KILN_BIN/kilnd" --check --state-dir "$home/none" --run-dir "$home/none" 2>/dev/null | grep -q "^\[$1\]"; }

fullness() { df --output=pcent "$home/disk" | tail -n 1 | tr -d ' %'; }

has_room() { [[ $(fullness) -le $1 ]]; }

# In the words of the point. What was thrown away has the key of its project in its name.
order_of_going() {
    local key text name
    kiln events --json | jq -r 'select(.kind == "evicted" or .kind == "purged") | (.key // "-") + " " + .text' | while read -r key text; do
        for name in thrown old middle new leased hot; do
            case "$key $text" in
                "f"*"${keys[leased]}"*) name=fork; break ;;
                *"${keys[$name]}"*) break ;;
                *) name= ;;
            esac
        done
        [[ -z $name ]] || echo "$name"
    done | uniq | tr '\n' ' ' | sed 's/ $//'
}
