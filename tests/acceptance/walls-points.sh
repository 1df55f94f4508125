# shellcheck shell=bash
# shellcheck disable=SC2154  # kilnd_pid, hello_status and so on come from scripts/lib/kilnd.sh, the rest from harness.sh
# What a fork reaches. Source this file after forks-points.sh.
#
# Two network namespaces stand around the host. In the first lies all the rest of the world: whatever comes from the daemons'
# range is sent there by a rule of its own, and there each address of FAR_* is answered by the same small web server, so that
# what is not reached was kept back, and did not just not exist. In the second is a bystander, with an address of the range and
# not Kiln's: it reaches them all.

WORLD=kiln-world
BYSTANDER=kiln-bystander
# The host's end, and the world's.
HERE=10.94.0.1
THERE=10.94.0.2
FAR_OPEN=(5.5.5.5)
FAR_CLOSED=(169.254.169.254 168.63.129.16 169.254.170.2 10.200.0.1 172.16.0.1 192.168.0.1 100.64.0.1)
FAR_CLOSED_6=(fd00:ec2::254 fd00::1 2606:4700::1111)
ROUTES=9300

in_world() { ip netns exec "$WORLD" "$@"; }

world_up() {
    local address
    world_down
    ip netns add "$WORLD"
    ip link add kwn0 type veth peer name kwn1 netns "$WORLD"
    ip addr add "$HERE/24" dev kwn0
    ip -6 addr add fd94::1/64 dev kwn0 nodad
    ip link set kwn0 up
    in_world ip link set lo up
    in_world ip addr add "$THERE/24" dev kwn1
    in_world ip -6 addr add fd94::2/64 dev kwn1 nodad
    in_world ip link set kwn1 up
    in_world ip route add default via "$HERE"
    in_world ip -6 route add default via fd94::1
    for address in "${FAR_OPEN[@]}" "${FAR_CLOSED[@]}"; do in_world ip addr add "$address/32" dev lo; done
    for address in "${FAR_CLOSED_6[@]}"; do in_world ip -6 addr add "$address/128" dev lo nodad; done
    # For the range only: whatever else this machine does finds its ways as before.
    ip route add default via "$THERE" table "$ROUTES"
    ip -6 route add default via fd94::2 table "$ROUTES"
    ip rule add from "10.$KILN_RANGE.0.0/16" lookup "$ROUTES" priority 9300
    ip -6 rule add from fd93::/64 lookup "$ROUTES" priority 9300
    mkdir -p "$home/web"
    echo here >"$home/web/index.html"
    listen_in "$WORLD" 80
    listen_in "$WORLD" 5000
    listen_in '' 8180
    listen_in '' 5001
    ip netns add "$BYSTANDER"
    ip link add kwb0 type veth peer name kwb1 netns "$BYSTANDER"
    ip addr add "10.$KILN_RANGE.255.1/30" dev kwb0
    ip -6 addr add fd93::1/64 dev kwb0 nodad
    ip link set kwb0 up
    ip netns exec "$BYSTANDER" ip addr add "10.$KILN_RANGE.255.2/30" dev kwb1
    ip netns exec "$BYSTANDER" ip -6 addr add fd93::2/64 dev kwb1 nodad
    ip netns exec "$BYSTANDER" ip link set kwb1 up
    ip netns exec "$BYSTANDER" ip route add default via "10.$KILN_RANGE.255.1"
    ip netns exec "$BYSTANDER" ip -6 route add default via fd93::1
    forwarding=$(</proc/sys/net/ipv6/conf/all/forwarding)
    echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
    echo "$forwarding" >"$home/forwarding"
    # Kiln turns it on with its table.
    echo 1 >/proc/sys/net/ipv4/ip_forward
}

world_down() {
    local pid
    if [[ -s $home/listeners ]]; then
        while read -r pid; do kill "$pid" 2>/dev/null || true; done <"$home/listeners"
        rm -f -- "$home/listeners"
    fi
    [[ ! -s $home/forwarding ]] || cat "$home/forwarding" >/proc/sys/net/ipv6/conf/all/forwarding
    ip rule del priority 9300 2>/dev/null || true
    ip -6 rule del priority 9300 2>/dev/null || true
    ip link del kwn0 2>/dev/null || true
    ip link del kwb0 2>/dev/null || true
    ip netns del "$WORLD" 2>/dev/null || true
    ip netns del "$BYSTANDER" 2>/dev/null || true
}

# listen_in NAMESPACE PORT: a web server on all its addresses.
listen_in() {
    local enter=()
    [[ -z $1 ]] || enter=(ip netns exec "$1")
    # busybox takes the directory it is called in when it is told of none.
    "${enter[@]}" "$PLACE/busybox/busybox" httpd -f -p "$2" -h "$home/web" </dev/null >>"$home/logs/web" 2>&1 &
    echo "$!" >>"$home/listeners"
}

# places: a line `WORD HOST PORT` each. `open` is what a fork may reach.
places() {
    local address
    for address in "${FAR_OPEN[@]}"; do echo "open $address 80"; done
    echo "open $THERE 5000"
    echo "open $HERE 5001"
    for address in "${FAR_CLOSED[@]}" "$THERE"; do echo "closed $address 80"; done
    for address in "$HERE" 169.254.0.1; do
        echo "closed $address 8180"
        echo "closed $address $(port_of api)"
    done
    echo "closed $HERE $(port_of gateway)"
    echo "closed $neighbour 8372"
    for address in "${FAR_CLOSED_6[@]}" fd94::2; do echo "closed [$address] 80"; done
    echo "closed [fd94::1] 8180"
}

port_of() { sed -n "/^\[$1\]/,/^\[/s/^listen = .*:\([0-9]*\)\"/\1/p" "$home/kiln.toml"; }

# A connection that opens is enough. reaches HOST PORT, for a shell that has busybox.
# shellcheck disable=SC2016  # it is the other shell's
REACHES='reaches() { busybox nc -w 2 "$(echo "$1" | busybox tr -d "[]")" "$2" </dev/null >/dev/null 2>&1; }'

# try_places FILE WORD...: the words run a shell with busybox. A line `open HOST PORT` or `closed HOST PORT` each, as found.
try_places() {
    local file=$1 script
    shift
    script="$REACHES
$(places | awk '{ print "(reaches \"" $2 "\" " $3 " && echo open \"" $2 "\" " $3 " || echo closed \"" $2 "\" " $3 ") &" }')
wait"
    "$@" "$script" | grep -E '^(open|closed) ' | sort >"$file" || true
}

# as_it_should FILE WHERE
as_it_should() {
    places | sort >"$home/places"
    same "$2: nothing else is reached, and all that should be" '' "$(diff "$home/places" "$1" | sed -n 's/^> //p' | tr '\n' ';')"
    same "$2: each was tried" "$(wc -l <"$home/places")" "$(wc -l <"$1")"
}

# === walls

point_walls() {
    only_incus || return 0
    local repo=example.com/caches/walls key neighbour fork pid inside
    # The gateway where a fork could reach it if it were let.
    caches_config '' "[network]
mirrors = [\"$THERE:5000\", \"$HERE:5001\"]"
    sed -i "/^\[gateway\]/,/^\[/s/127.0.0.1/$HERE/" "$home/kiln.toml"
    world_up
    kilnd_start "$home/kiln.toml"
    hello first "$repo"
    same "a first build of the project" 0 "$hello_status"
    key=$(kiln key --repo "$repo")
    neighbour=$(project "$key" address)
    neighbour=${neighbour%:*}

    try_places "$home/bystander" ip netns exec "$BYSTANDER" "$PLACE/busybox/busybox" sh -c
    # But for the neighbour, which Kiln guards, and the API, which is on loopback.
    same "without walls all of it is reached" "$(places | awk '{ print $2, $3 }' | grep -vE "^$neighbour | $(port_of api)$" | sort)" \
        "$(sed -n 's/^open //p' "$home/bystander" | sort)"

    before_the_start "$repo"
    fork=$(answer early .key)

    # From its namespace, with an IPv6 address of its own making.
    pid=$(daemon_of "$fork" | awk '{ print $2 }')
    inside=(nsenter --target "$pid" --net)
    "${inside[@]}" ip -6 addr add fd93::77/64 dev eth0 nodad || true
    "${inside[@]}" ip -6 route add default via "$(ip -6 -o addr show dev "$(nic_of "$fork")" scope link | sed -E 's,.*inet6 ([^/]*)/.*,\1,')" dev eth0 || true
    ip -6 route add fd93::77/128 dev "$(nic_of "$fork")" || true
    try_places "$home/namespace" "${inside[@]}" "$PLACE/busybox/busybox" sh -c
    as_it_should "$home/namespace" "from the fork's namespace, with an IPv6 address"

    # From a step of a build.
    mkdir -p "$home/context"
    cp "$PLACE/busybox/busybox" "$home/context/"
    printf '%s\n' 'FROM scratch' 'COPY busybox /bin/busybox' 'COPY try /try' 'RUN ["/bin/busybox", "sh", "/try"]' >"$home/context/Dockerfile"
    try_places "$home/step" step_of_fork
    as_it_should "$home/step" "from a step of a build"
    give_back early

    holes "$repo" "$fork"
}

end_walls() { world_down; }

# The name of its interface on the host: its address in hexadecimal digits.
nic_of() {
    local parts
    IFS=.: read -r -a parts <<<"$(project "$1" address)"
    printf 'kiln%02x%02x%02x%02x' "${parts[@]:0:4}"
}

# Runs a script in a RUN of a fork, and prints what it says.
step_of_fork() {
    printf 'busybox() { /bin/busybox "$@"; }\n%s\n' "$1" >"$home/context/try"
    mkdir -p "$home/client-step"
    HOME=$home/client-step KILN_BUILDX=$BUILDKIT_BIN/buildx KILN_UNTRUSTED=1 KILN_PULL_REQUEST=early kiln build --repo "$repo" --progress=plain \
        "$home/context" </dev/null >"$home/logs/step" 2>&1 || tail -n 20 "$home/logs/step" >&2
    sed -nE 's/^#[0-9]+ [0-9.]+ ((open|closed) .*)$/\1/p' "$home/logs/step"
}

# The set of its lane had the interface before pid 1 of the instance began.
before_the_start() {
    local monitor pid admitted began line
    : >"$home/elements"
    (
        stdbuf -oL nft monitor elements | while read -r line; do echo "$(now_us) $line"; done >>"$home/elements"
    ) &
    monitor=$!
    await 5 watches || true
    asked_fork early "$1" early
    same "a fork" 200 "$asked_status"
    fork=$(answer early .key)
    pid=$(daemon_of "$fork" | awk '{ print $2 }')
    admitted=$(awk -v nic="\"$(nic_of "$fork")\"" 'index($0, "add element") && index($0, " untrusted ") && index($0, nic) { print $1; exit }' "$home/elements")
    # Of the clock that began with the machine, in hundredths of a second.
    began=$(awk -v ticks="$(sed 's/.*) //' "/proc/$pid/stat" | awk '{ print $20 }')" -v now="$(now_us)" \
        '{ printf "%.0f", now - ($1 - ticks / 100) * 1000000 }' /proc/uptime)
    pkill -P "$monitor" || true
    kill "$monitor" 2>/dev/null || true
    check "its interface was in the set of untrusted ones" test -n "$admitted"
    check "before its first process began" test "${admitted:-$began}" -lt "$began"
    figure "the rules were there before its first process for" "$(((began - ${admitted:-$began}) / 1000))" ms
    check "and in no other" not_in_set trusted "$(nic_of "$fork")"
}

# An element comes and goes until the monitor tells of it.
watches() {
    nft add element inet "$KILN_TABLE" trusted '{ "kwatch" }'
    nft delete element inet "$KILN_TABLE" trusted '{ "kwatch" }'
    [[ -s $home/elements ]]
}

not_in_set() { ! nft list set inet "$KILN_TABLE" "$1" | grep -qF -- "\"$2\""; }

# === What is made by hand into the table

holes() {
    local handle started
    # One that can be seen in the table is mended before the next start.
    handle=$(nft -a list chain inet "$KILN_TABLE" to_host | sed -nE 's/.*goto refuse # handle ([0-9]+)$/\1/p')
    nft delete rule inet "$KILN_TABLE" to_host handle "$handle"
    asked_fork mended "$1" mended
    same "a rule that is missing: the fork is served" 200 "$asked_status"
    check "because it was put back before" grep -q 'goto refuse' <<<"$(nft list chain inet "$KILN_TABLE" to_host)"
    give_back mended

    # One with as many rules as there should be is seen by who tries it.
    handle=$(nft -a list chain inet "$KILN_TABLE" to_host | sed -nE 's/.*goto refuse # handle ([0-9]+)$/\1/p')
    nft replace rule inet "$KILN_TABLE" to_host handle "$handle" accept
    started=$(now_ms)
    asked_fork hole "$1" hole
    check "a hole in the table: the fork is not served" test "$asked_status" -ge 500
    figure "hole to refusal" "$(($(now_ms) - started))" ms
    sed 's/^/    /' "$home/answers/hole" && echo
    check "an event tells" grep -q '"kind":"not-isolated"' <<<"$(kiln events --json)"
    kiln events --json | jq -r 'select(.kind == "not-isolated") | "    " + .text' | tail -n 1
    check "it does not run" await 20 not_running "$(kiln key --repo "$1" --untrusted --pull-request hole)"
    check "the project's own daemon does" is_phase "$(kiln key --repo "$1")" warm
}

not_running() { [[ -z $(daemon_of "$1") ]]; }
