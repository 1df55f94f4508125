# shellcheck shell=bash
# A private Incus for the demo and the tests: its own socket, database and storage in one directory. Source this file.
#
#   incus_install       installs Incus and its tools from the machine's own package sources
#   incus_up DIR        starts an incusd on DIR with a storage pool `kiln`; running already is success
#   incus_down DIR [TABLE]
#                       stops and removes everything that incus_up and Kiln made in DIR, also after a killed run, and the
#                       nftables table `inet TABLE` of the Kiln that used it
#
# An Incus of the admin's is never talked to: every call names DIR. Needs root. Says what it does on stderr.

_incus_say() { printf 'incus: %s\n' "$*" >&2; }
_incus_die() { _incus_say "$*"; return 1; }
_incus() { INCUS_DIR=$_incus_dir incus "$@" </dev/null; }

_incus_daemon() {
  local f
  for f in /usr/libexec/incus/incusd /usr/lib/incus/incusd /opt/incus/bin/incusd; do
    [ -x "$f" ] && { printf '%s\n' "$f"; return; }
  done
  command -v incusd
}

# The mirror that serves this release's `main`, as apt itself understands the configured sources (either format).
# Prints: URI SUITE
_incus_mirror() {
  local codename
  # shellcheck disable=SC1091
  codename=$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")
  # shellcheck disable=SC2016  # these are apt's variables
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' |
    awk -v release="$codename" '$2 == release && $3 == "main" && $4 == "Debian" { print $1, $2; exit }'
}

_incus_apt() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

# Where the release itself has no Incus (Debian 12), its backports do: add them from the same mirror.
_incus_add_backports() {
  local uri suite list=/etc/apt/sources.list.d/kiln-backports.sources key=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -n "$(_incus_mirror)" ] || _incus_apt update || return 1
  read -r uri suite < <(_incus_mirror)
  [ -n "$uri" ] || { _incus_die "no Debian mirror among the configured package sources; install incus-base by hand"; return 1; }
  _incus_say "adding $suite-backports from the machine's mirror ($list)"
  {
    printf 'Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\n' "$uri" "$suite"
    [ ! -r "$key" ] || printf 'Signed-By: %s\n' "$key"
  } >"$list.new" && mv "$list.new" "$list"
  _incus_apt update
}

# Not `grep -q` at a pipe's end: it leaves early, and under pipefail what apt-cache then dies of would count as a no.
_incus_candidate() { [[ $(apt-cache policy "$1" 2>/dev/null) == *'Candidate: '[0-9]* ]]; }

# `command -v` with many names is content with one.
_incus_has() { local name; for name in "$@"; do command -v "$name" >/dev/null || return 1; done; }

incus_install() {
  local tools='nftables btrfs-progs iproute2 uidmap' packages=(incus) suite=''
  if _incus_daemon >/dev/null && _incus_has incus nft mkfs.btrfs ip newuidmap; then return 0; fi
  _incus_candidate incus-base || _incus_candidate incus || _incus_apt update
  if ! _incus_candidate incus-base && ! _incus_candidate incus; then
    _incus_add_backports || return 1
    # shellcheck disable=SC1091
    suite=/$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")-backports
  fi
  # Debian's `incus` is virtual machines too, with QEMU.
  if _incus_candidate incus-base; then packages=(incus-base); fi
  if _incus_candidate incus-client; then packages+=(incus-client); fi
  _incus_say "installing ${packages[*]} $tools"
  # NAME/SUITE and not -t SUITE, which would take systemd and iproute2 from the backports too.
  # shellcheck disable=SC2086
  _incus_apt install --no-install-recommends -y "${packages[@]/%/$suite}" &&
    _incus_apt install --no-install-recommends -y $tools &&
    { _incus_daemon >/dev/null || _incus_die "the packages hold no incusd"; }
}

# Ids for unprivileged containers, where root has none.
_incus_ids() {
  local f
  for f in /etc/subuid /etc/subgid; do
    grep -qs '^root:' "$f" || printf 'root:1000000:1000000000\n' >>"$f"
  done
}

_incus_answers() { _incus query /1.0 >/dev/null 2>&1; }

# The pid of the incusd that serves DIR, known by its log file: a container's monitor is the same program with the same
# environment, and killing that one ends the container.
_incus_pid() {
  local p
  for p in $(pidof incusd 2>/dev/null); do
    if tr '\0' '\n' 2>/dev/null <"/proc/$p/cmdline" | grep -qxF "$_incus_dir/incusd.log"; then printf '%s\n' "$p"; return; fi
  done 2>/dev/null
  return 1
}

# incus_start DIR: only the daemon, without making anything; the tests restart it with this.
incus_start() {
  local _incus_dir daemon n
  _incus_dir=$(realpath -m "$1")
  _incus_answers && return 0
  daemon=$(_incus_daemon) || { _incus_die "there is no incusd: run incus_install"; return 1; }
  mkdir -p "$_incus_dir" && chmod 0711 "$_incus_dir"
  [ "${#_incus_dir}" -le 80 ] || { _incus_die "$_incus_dir is too long for a socket's path"; return 1; }
  if ! _incus_pid >/dev/null; then
    # Every descriptor is closed for it, or a caller's pipe or lock would stay open for as long as it lives.
    ( cd / && for n in /proc/self/fd/*; do n=${n##*/}; [ "$n" -le 2 ] || eval "exec $n>&-"; done
      INCUS_DIR=$_incus_dir exec setsid "$daemon" --group root --logfile "$_incus_dir/incusd.log" \
        </dev/null >>"$_incus_dir/incusd.out" 2>&1 ) &
    disown
  fi
  for n in $(seq 600); do
    if _incus_answers; then return 0; fi
    sleep 0.1
  done
  tail -n 20 "$_incus_dir/incusd.out" "$_incus_dir/incusd.log" >&2
  _incus_die "incusd on $_incus_dir does not answer after 60 s (its log is above)"
}

incus_up() {
  local _incus_dir
  _incus_dir=$(realpath -m "$1")
  _incus_ids
  incus_start "$_incus_dir" || return 1
  if ! _incus storage show kiln >/dev/null 2>&1; then
    # On btrfs an instance's root is a snapshot of the image, made in an instant; `dir` unpacks the image each time.
    if ! _incus storage create kiln btrfs size=8GiB >/dev/null 2>"$_incus_dir/pool.err"; then
      _incus_say "no btrfs pool ($(tr '\n' ' ' <"$_incus_dir/pool.err")), using plain directories"
      _incus storage create kiln dir >/dev/null || return 1
    fi
  fi
  _incus_say "ready on $_incus_dir/unix.socket, pool kiln ($(_incus storage get kiln source 2>/dev/null))"
}

# SIGTERM, then SIGKILL when it is still there after 10 s.
_incus_end() {
  local pid=$1
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null || true
}

# Containers that outlived their daemon: the monitor's command line names DIR.
_incus_monitors() {
  local p
  for p in /proc/[0-9]*; do
    if tr '\0' ' ' 2>/dev/null <"$p/cmdline" | grep -qF "[lxc monitor] $_incus_dir/containers "; then printf '%s\n' "${p##*/}"; fi
  done 2>/dev/null
}

incus_down() {
  local _incus_dir line project name pid
  _incus_dir=$(realpath -m "$1")
  if [ -n "${2-}" ]; then nft delete table inet "$2" 2>/dev/null || true; fi
  [ -d "$_incus_dir" ] || return 0
  case $_incus_dir in / | /var/lib/incus | /var/lib | /home | /root | /tmp) _incus_die "$_incus_dir is not a private Incus"; return 1 ;; esac
  # A daemon that was killed is started once more: it alone knows what it made.
  if [ -d "$_incus_dir/database" ] && _incus_daemon >/dev/null && incus_start "$_incus_dir" 2>/dev/null; then
    _incus list --all-projects --format csv -c en 2>/dev/null | while IFS=, read -r project name; do
      _incus delete --force --project "$project" "$name" >/dev/null 2>&1 || _incus_say "could not delete $project/$name"
    done
    for project in $(_incus project list --format csv 2>/dev/null | cut -d, -f1 | sed 's/ (current)//'); do
      _incus image list --project "$project" --format csv -c f 2>/dev/null | while read -r line; do
        _incus image delete --project "$project" "$line" >/dev/null 2>&1 || true
      done
    done
    _incus storage delete kiln >/dev/null 2>&1 || true
  fi
  if pid=$(_incus_pid); then _incus_end "$pid"; fi
  for pid in $(_incus_monitors); do _incus_end "$pid"; done
  # Deepest first; a loop device goes with its mount because Incus attaches it so.
  awk -v dir="$_incus_dir/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r line; do
    umount -l "$line" 2>/dev/null || true
  done
  losetup -l -n -O NAME,BACK-FILE 2>/dev/null | awk -v dir="$_incus_dir/" 'index($2, dir) == 1 { print $1 }' | while read -r line; do
    losetup -d "$line" 2>/dev/null || true
  done
  rm -rf --one-file-system "$_incus_dir"
}
