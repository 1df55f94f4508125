# shellcheck shell=bash
# Making the programs. What is pinned and slow to make is kept in the user's cache by the hash of its recipe.
# Source this file after common.sh; KILN_ROOT is the repository.
#
#   build_kiln         kilnd, kiln (dev profile) -> KILN_BIN, their directory
#   build_buildkit     buildkitd, buildctl, buildx -> BUILDKIT_BIN, their directory
#   build_init         kiln-init, linked with nothing; prints its path
#
# Where there is no compiler, KILN_BIN, BUILDKIT_BIN and KILN_INIT name what was built elsewhere, and nothing is built.
#
#   cached NAME HASH MAKE...
#                      runs `MAKE... DIR` once for NAME-HASH, whoever else wants it at the same time; prints the directory

# The lock is on a file of its own, so that two scripts at once make a thing once; a killed maker leaves only a `.new`
# directory, which the next one removes.
cached() {
    local name=$1 hash=$2 cache dir started
    shift 2
    cache=$(kiln_cache)
    dir=$cache/$name-$hash
    if [[ ! -d $dir ]]; then
        exec {_cache_lock}>"$cache/$name.lock"
        flock "$_cache_lock"
        if [[ ! -d $dir ]]; then
            say "making $name (kept in $dir)"
            started=$(now_ms)
            rm -rf -- "$dir.new"
            "$@" "$dir.new" >&2 || { exec {_cache_lock}>&-; rm -rf -- "$dir.new"; return 1; }
            mv -T -- "$dir.new" "$dir"
            say "made $name from nothing in $(seconds $(($(now_ms) - started)))"
        fi
        exec {_cache_lock}>&-
    fi
    printf '%s\n' "$dir"
}

build_buildkit() {
    [[ -z ${BUILDKIT_BIN:-} ]] || return 0
    local recipe=$KILN_ROOT/packaging/buildkit hash
    hash=$(cd -- "$recipe" && { sha256sum build go.mod go.sum && GOTOOLCHAIN=local go version; } | sha256sum | cut -c1-16)
    BUILDKIT_BIN=$(cached buildkit "$hash" "$recipe/build") || die 1 "cannot build BuildKit: the reason is above"
    export BUILDKIT_BIN
}

build_kiln() {
    [[ -z ${KILN_BIN:-} ]] || return 0
    (cd -- "$KILN_ROOT" && cargo build --locked --bins >&2) || die 1 "cannot build kiln: the reason is above"
    KILN_BIN=$(cd -- "$KILN_ROOT" && cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/debug
    export KILN_BIN
}

# It is pid 1 of an image that may hold another libc.
build_init() {
    local host target
    if [[ -n ${KILN_INIT:-} ]]; then
        printf '%s\n' "$KILN_INIT"
        return
    fi
    host=$(rustc -vV | sed -n 's/^host: //p')
    target=$(dirname -- "$KILN_BIN")
    (cd -- "$KILN_ROOT" && RUSTFLAGS='-C target-feature=+crt-static' cargo build --locked -p kiln-init --target "$host" >&2) ||
        die 1 "cannot build kiln-init: the reason is above"
    printf '%s\n' "$target/$host/debug/kiln-init"
}
