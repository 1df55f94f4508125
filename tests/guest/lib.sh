# shellcheck shell=bash
# A guest: Debian 13 with OpenZFS and Incus under QEMU, for what a container or a plain box cannot show. Source this file
# after common.sh, build.sh, place.sh and incus.sh; KILN_ROOT is the repository. Needs root.
#
#   guest_possible           makes what is needed (QEMU, the image: the first time 10 to 20 minutes); fails, after one line
#                            `skipped: …` on stdout, where this machine cannot have a guest
#   guest_up DIR             boots a guest whose disks, share and console lie in DIR; one that runs there already is used on
#   guest_at DIR             talks to the guest that runs there already
#   guest_run NAME SCRIPT [SECONDS]
#                            runs the script (a file, or `-` for stdin) in the guest as root, shows its output as it
#                            comes, and returns its exit code; 124 when it took longer (default 300), 125 when the guest
#                            went away or does not answer
#   guest_pack DIR FILE...   before it is booted in DIR: these files and directories are unpacked in /opt/kiln by guest_unpack, quicker than
#                            from the share, where each read is an errand; programs without debug information
#   guest_unpack             does that
#   guest_put FILE...        copies files or directories to the guest's /share/bin; programs without debug information
#   guest_pool               makes the pool `tank` on the second disk, unless it is there
#   guest_incus              Incus on tank/incus, with no network of its own, unless it is there
#   guest_reboot             reboots in good order, and waits until it runs scripts again
#   guest_kill               the power cut: ends QEMU with SIGKILL, and boots again on the same disks
#   guest_down               ends it; the disks go, share/ and console.log stay
#
# DIR/share is /share in the guest. Nothing reaches the guest by network. It ends with the shell that booted it, however
# that ends; GUEST_OWNER is another process to end with, or `none`. More settings: GUEST_MEMORY (MiB), GUEST_TANK (size of the
# second disk), GUEST_ACCEL (kvm or tcg).

GUEST_MEMORY=${GUEST_MEMORY:-4096}
GUEST_TANK=${GUEST_TANK:-12G}
# Boots take a minute of the processor where each instruction is emulated. A machine that is busy with other things has been seen to
# give it an eighth of one.
GUEST_BOOT_DEADLINE=${GUEST_BOOT_DEADLINE:-1200}
# In GiB: the image and the rootfs it is made of, and what one run writes.
_GUEST_MAKING=7
_GUEST_RUNNING=4

_guest_dir=''
_guest_image=''
guest_boot_started=0
# How long the last boot took, until it ran scripts.
guest_boot_ms=0

_guest_say() { say "guest: $*"; }
_guest_skip() { echo "skipped: every test in the guest: $*"; return 1; }

guest_possible() {
    [[ -z $_guest_image ]] || return 0
    [[ $EUID -eq 0 ]] || _guest_skip "it needs root" || return 1
    [[ $(uname -m) == x86_64 ]] || _guest_skip "its image is for amd64, this machine is $(uname -m)" || return 1
    type -P apt-get >/dev/null || _guest_skip "its image is made of Debian's packages, and this machine has no apt-get" || return 1
    _guest_room "${KILN_DEMO_DIR:-/var/tmp}" "$_GUEST_RUNNING" || return 1
    _guest_memory || return 1
    _guest_qemu || return 1
    _guest_make
}

# In two halves, for what takes minutes changes rarely.
_guest_make() {
    local recipe=$KILN_ROOT/tests/guest/image cache packages disk mirror made
    local failed="the guest's image cannot be made: the reason is above"
    cache=$(kiln_cache)
    packages=$(cd -- "$recipe" && sha256sum packages stages.sh | sha256sum | cut -c1-16)
    disk=$(cd -- "$recipe" && { echo "$packages" && sha256sum disk runner runner.service; } | sha256sum | cut -c1-16)
    if [[ ! -d $cache/guest-$disk ]]; then
        if [[ ! -d $cache/guest-packages-$packages ]]; then
            _guest_room "$cache" "$_GUEST_MAKING" || return 1
            (need_packages debootstrap debian-archive-keyring) || _guest_skip "debootstrap cannot be installed" || return 1
            [[ -n $(_incus_mirror) ]] || _apt update || true
            read -r mirror _ < <(_incus_mirror) || true
            [[ -n $mirror ]] || _guest_skip "there is no Debian mirror among the configured package sources" || return 1
            _guest_say "making its image takes 10 to 20 minutes, once"
        fi
        made=$(cached guest-packages "$packages" "$recipe/packages" "${mirror-}") || die 1 "$failed"
        made=$(cached guest "$disk" "$recipe/disk" "$made") || die 1 "$failed"
    fi
    _guest_image=$cache/guest-$disk
    touch -c -- "$_guest_image" "$cache/guest-packages-$packages"
    # Those of recipes that no checkout has used for a month.
    find "$cache" -maxdepth 1 -type d -name 'guest-*' -mtime +30 -exec rm -rf -- {} +
}

# _guest_room DIR GIB
_guest_room() {
    local free
    mkdir -p -- "$1"
    free=$(df --output=avail -B1G -- "$1" | tail -n 1)
    [[ $free -ge $2 ]] || _guest_skip "$1 has ${free// /} GiB free, $2 are needed"
}

_guest_memory() {
    local free
    free=$(awk '$1 == "MemAvailable:" { print int($2 / 1024) }' /proc/meminfo)
    [[ $free -ge $((GUEST_MEMORY + 512)) ]] ||
        _guest_skip "$free MiB of memory are free, $((GUEST_MEMORY + 512)) are needed"
}

_guest_qemu() {
    local suite=()
    if _incus_has qemu-system-x86_64 qemu-img; then return 0; fi
    # shellcheck disable=SC1091
    if [[ $(. /etc/os-release && printf '%s' "${VERSION_CODENAME-}") == bookworm ]]; then
        # The one in its main is older than this guest's kernel likes, and does not go with a qemu-utils of the backports.
        [[ $(apt-cache policy qemu-system-x86 2>/dev/null) == *'~bpo12'* ]] || _incus_add_backports ||
            _guest_skip "there is no qemu-system-x86 of bookworm-backports to be had" || return 1
        suite=(-t bookworm-backports)
    fi
    _guest_say "installing QEMU"
    _apt install -y --no-install-recommends "${suite[@]}" qemu-system-x86 qemu-utils 2>/dev/null ||
        { _apt update && _apt install -y --no-install-recommends "${suite[@]}" qemu-system-x86 qemu-utils; } ||
        _guest_skip "qemu-system-x86 cannot be installed: see apt's words above"
}

# Whether KVM is there says the kernel itself: it must come as far as missing its root disk. An open /dev/kvm is no proof: on
# a virtual machine without nested paging it may emulate the guest's kernel, slower than QEMU does. Asked once a boot.
_guest_accel() {
    local memo started
    if [[ -n ${GUEST_ACCEL:-} ]]; then
        _guest_say "with $GUEST_ACCEL, as it was told to"
        return
    fi
    memo=$(kiln_cache)/guest-accel
    if [[ ! -w /dev/kvm ]]; then
        GUEST_ACCEL=tcg
        _guest_say "emulated (tcg): there is no /dev/kvm"
        return
    fi
    if [[ $(head -n 1 "$memo" 2>/dev/null) != "$(</proc/sys/kernel/random/boot_id)" ]]; then
        started=$(now_ms)
        GUEST_ACCEL=tcg
        if timeout --kill-after=5 15 qemu-system-x86_64 -nodefaults -display none -no-reboot -accel kvm -cpu host -m 512 \
            -kernel "$_guest_image/vmlinuz" -append "panic=-1 quiet" </dev/null >/dev/null 2>&1; then
            GUEST_ACCEL=kvm
        fi
        printf '%s\n%s\n%s\n' "$(</proc/sys/kernel/random/boot_id)" "$GUEST_ACCEL" "$(seconds $(($(now_ms) - started)))" >"$memo"
    fi
    GUEST_ACCEL=$(sed -n 2p "$memo")
    if [[ $GUEST_ACCEL == kvm ]]; then
        _guest_say "under KVM"
    else
        _guest_say "emulated (tcg): with /dev/kvm the guest's kernel did not come up in $(sed -n 3p "$memo")"
    fi
}

_guest_running() {
    local pid start
    read -r pid start 2>/dev/null <"$_guest_dir/qemu" && [[ $(_place_owner "$pid") == "$pid $start" ]]
}

guest_up() {
    local owner=${GUEST_OWNER:-$$}
    mkdir -p -- "$1"
    _guest_dir=$(realpath -- "$1")
    if _guest_running; then guest_at "$1"; return; fi
    guest_possible || return 1
    _guest_accel
    rm -rf -- "$_guest_dir/share/q" "$_guest_dir/share/out" "$_guest_dir/share/boot" "$_guest_dir/console.log"
    mkdir -p -- "$_guest_dir/share/"{q,out,bin}
    cp -- "$KILN_ROOT/tests/guest/runner.sh" "$KILN_ROOT/tests/guest/case.sh" "$_guest_dir/share/"
    # The image is never written to: what the guest changes lies in a disk of its own.
    [[ -e $_guest_dir/disk.qcow2 ]] ||
        qemu-img create -q -f qcow2 -F raw -b "$_guest_image/disk.img" "$_guest_dir/disk.qcow2" >&2 || return 1
    [[ -e $_guest_dir/tank.img ]] || truncate -s "$GUEST_TANK" "$_guest_dir/tank.img"
    printf '%s\n' "$owner" >"$_guest_dir/qemu.owner"
    printf '%s\n' "$_guest_image" "$GUEST_ACCEL" >"$_guest_dir/qemu.image"
    _guest_boot
}

guest_at() {
    _guest_dir=$(realpath -- "$1")
    _guest_running || { _guest_say "there is no guest running in $1"; return 1; }
    # To boot it again takes the image it lies on, whatever the recipe says by now.
    { read -r _guest_image && read -r GUEST_ACCEL; } <"$_guest_dir/qemu.image"
}

_guest_boot() { _guest_start && _guest_await_boot '' 300; }

# Starts QEMU, which goes into the background by itself.
_guest_start() {
    local accel=(-accel kvm -cpu host) packed=() pid cpus owner
    # A newer processor would only mean more to emulate, at boot above all.
    [[ $GUEST_ACCEL == kvm ]] || accel=(-accel "tcg,thread=multi,tb-size=1024" -cpu Nehalem)
    [[ ! -e $_guest_dir/packed.tar ]] || packed=(-drive "file=packed.tar,if=virtio,format=raw,readonly=on")
    cpus=$(nproc)
    [[ $cpus -le 4 ]] || cpus=4
    guest_boot_started=$(now_ms)
    rm -f -- "$_guest_dir/share/boot" "$_guest_dir/qemu" "$_guest_dir/qemu.pid"
    # What is beside the console in the kernel's words are things that a boot need not take time for: 32 serial lines, security
    # modules without rules, guards against other guests. From its own directory: a comma in a path would end a value.
    (cd -- "$_guest_dir" && qemu-system-x86_64 -name kiln-guest -nodefaults -display none -nic none "${accel[@]}" -smp "$cpus" -m "$GUEST_MEMORY" \
        -kernel "$_guest_image/vmlinuz" -initrd "$_guest_image/initrd.img" \
        -append "console=ttyS0 8250.nr_uarts=1 lsm=landlock,lockdown,yama,apparmor mitigations=off nokaslr" \
        -drive file=disk.qcow2,if=virtio,format=qcow2,cache=unsafe -drive file=tank.img,if=virtio,format=raw,cache=unsafe,discard=unmap "${packed[@]}" \
        -virtfs local,path=share,mount_tag=share,security_model=none,multidevs=remap -device virtio-rng-pci \
        -chardev file,id=console,path=console.log,append=on -serial chardev:console \
        -daemonize -pidfile "$_guest_dir/qemu.pid" </dev/null >&2) ||
        { _guest_say "QEMU does not start: its words are above"; return 1; }
    pid=$(<"$_guest_dir/qemu.pid")
    _place_owner "$pid" >"$_guest_dir/qemu"
    owner=$(<"$_guest_dir/qemu.owner")
    if [[ $owner != none ]]; then _guest_watch "$owner" "$pid"; fi
}

# A process of its own session: QEMU ends with its owner also when that is killed.
_guest_watch() {
    local owner guest
    owner=$(_place_owner "$1") guest=$(_place_owner "$2")
    # shellcheck disable=SC2016  # it is the other shell's
    setsid bash -c '
        same() { [[ -n $1 && $(awk '\''$3 != "Z" { print $1, $22 }'\'' "/proc/${1% *}/stat" 2>/dev/null) == "$1" ]]; }
        while same "$2"; do
            same "$1" || { kill -9 "${2% *}"; exit; }
            sleep 2
        done' kiln-guest-watch "$owner" "$guest" </dev/null >/dev/null 2>&1 &
    disown
}

# _guest_await_boot OLD KERNEL_SECONDS: until the runner of another boot than OLD has said that it is there. Where
# instructions are emulated, one kernel in fifty hangs before it has started a process, most of all on a busy machine. That is no
# test's matter: after KERNEL_SECONDS without one it is started once more.
_guest_await_boot() {
    local end=$((guest_boot_started + GUEST_BOOT_DEADLINE * 1000)) kernel_end=$((guest_boot_started + $2 * 1000)) boot
    while :; do
        boot=$(head -n 1 -- "$_guest_dir/share/boot" 2>/dev/null || true)
        if [[ -n $boot && $boot != "$1" ]]; then break; fi
        if ! _guest_running; then _guest_lost "QEMU ended while it booted"; return 125; fi
        if [[ $(now_ms) -ge $kernel_end ]]; then
            # Looked at once.
            kernel_end=$((end + 1000))
            if ! _guest_in_userspace; then
                _guest_lost "its kernel hangs; it is started once more"
                _guest_end KILL && _guest_start && _guest_await_boot "$1" "$GUEST_BOOT_DEADLINE"
                return
            fi
        fi
        if [[ $(now_ms) -ge $end ]]; then _guest_lost "it has not booted after $GUEST_BOOT_DEADLINE s"; return 125; fi
        sleep 0.2
    done
    guest_boot_ms=$(($(now_ms) - guest_boot_started))
    _guest_say "runs scripts $(seconds "$guest_boot_ms") after it was started"
}

# Whether the last kernel on the console has started systemd.
_guest_in_userspace() {
    local console
    console=$(tr -d '\0' <"$_guest_dir/console.log")
    console=${console##*'] Linux version '}
    [[ $console == *'systemd[1]: '* ]]
}

_guest_lost() {
    tail -n 25 -- "$_guest_dir/console.log" 2>/dev/null | tr -d '\000-\010\013-\037' | awk '{ print "    console: " $0 }' >&2
    _guest_say "$1 (the end of its console is above, all of it in $_guest_dir/console.log)"
}

guest_run() {
    local name=$1 script=$2 limit=${3:-300} share=$_guest_dir/share end log status boot
    _guest_running || { _guest_say "$name: there is no guest running"; return 125; }
    boot=$(<"$share/boot")
    rm -f -- "$share/out/$name."*
    : >"$share/out/$name.log"
    exec {log}<"$share/out/$name.log"
    _guest_submit "$name" "$script" "$limit" || { exec {log}<&-; return 125; }
    end=$(($(now_ms) + (limit + 40) * 1000)) status=''
    while [[ -z $status ]]; do
        if [[ -e $share/out/$name.rc ]]; then status=$(<"$share/out/$name.rc")
        elif ! _guest_running; then status=125; _guest_lost "$name: QEMU ended in the middle of it"
        elif [[ $(cat -- "$share/boot" 2>/dev/null || true) != "$boot" ]]; then status=125; _guest_say "$name: the guest was started anew in the middle of it"
        elif [[ $(now_ms) -ge $end ]]; then status=125; _guest_lost "$name: the guest does not answer $((limit + 40)) s after it got it"
        else sleep 0.1
        fi
        # From where the last look ended.
        cat <&"$log"
    done
    exec {log}<&-
    [[ $status -ne 124 ]] || _guest_say "$name was ended: it took longer than $limit s"
    return "$status"
}

# _guest_submit NAME SCRIPT SECONDS
_guest_submit() {
    local queue=$_guest_dir/share/q
    printf '%s\n' "$3" >"$queue/$1.limit"
    # Under another name first: the runner must not see half of it.
    if [[ $2 == - ]]; then cat >"$queue/$1.new"; else cp -- "$2" "$queue/$1.new"; fi || return 1
    mv -f -- "$queue/$1.new" "$queue/$1.sh"
}

guest_put() { _guest_copy "$_guest_dir/share/bin" "$@"; }

# _guest_copy DIR FILE...
_guest_copy() {
    local file copy dir=$1
    shift
    for file in "$@"; do
        copy=$dir/${file##*/}
        cp -rL -- "$file" "$copy.new" || return 1
        # A test program is mostly debug information, and each byte has to get into the guest.
        if [[ -f $copy.new ]] && type -P strip >/dev/null; then strip --strip-debug "$copy.new" 2>/dev/null || true; fi
        rm -rf -- "$copy"
        mv -- "$copy.new" "$copy"
    done
}

# An archive that is the third disk.
guest_pack() {
    local dir=$1
    shift
    mkdir -p -- "$dir/packed"
    _guest_copy "$dir/packed" "$@" && tar -C "$dir/packed" -cf "$dir/packed.tar" . && rm -rf -- "$dir/packed"
}

guest_unpack() {
    guest_run unpack - 300 <<<'set -e; mkdir -p /opt/kiln; blockdev --setra 8192 /dev/vdc; tar -C /opt/kiln -xf /dev/vdc'
}

guest_pool() { guest_run make-pool "$KILN_ROOT/tests/guest/make-pool.sh" 120; }

guest_incus() { guest_run make-incus "$KILN_ROOT/tests/guest/make-incus.sh" 300; }

guest_reboot() {
    local boot
    _guest_running || { _guest_say "reboot: there is no guest running"; return 125; }
    boot=$(head -n 1 -- "$_guest_dir/share/boot" 2>/dev/null || true)
    guest_boot_started=$(now_ms)
    # The answer goes with the boot that would give it.
    _guest_submit reboot - 60 <<<'systemctl --no-block start reboot.target' && _guest_await_boot "$boot" 480
}

guest_kill() {
    _guest_end KILL && _guest_boot
}

# _guest_end SIGNAL: only ever the process that was recorded. Returns when its disks are free.
_guest_end() {
    local pid tries
    if ! _guest_running; then return 0; fi
    read -r pid _ <"$_guest_dir/qemu"
    kill -s "$1" "$pid" 2>/dev/null || true
    for ((tries = 1; tries <= 300; tries++)); do
        # The first thread may be gone before the one that lets go of the disks.
        grep -qhs '^State:[[:space:]]*[^ZX]' "/proc/$pid/task/"*/status || return 0
        [[ $tries -ne 100 ]] || kill -s KILL "$pid" 2>/dev/null || true
        sleep 0.1
    done
    _guest_say "QEMU, process $pid, does not end"
    return 1
}

guest_down() {
    [[ -n $_guest_dir ]] || return 0
    _guest_end TERM
    rm -f -- "$_guest_dir/disk.qcow2" "$_guest_dir/tank.img" "$_guest_dir/packed.tar" "$_guest_dir/qemu" "$_guest_dir/qemu.pid" "$_guest_dir/qemu.owner" "$_guest_dir/qemu.image"
    _guest_dir=''
}
