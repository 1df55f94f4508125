#!/usr/bin/env bash
# In the guest: the pool `tank` on the second disk.
set -euo pipefail
if zpool list tank >/dev/null 2>&1; then exit 0; fi
# Nothing is mounted that does not say so itself; the rest is what Kiln's host documentation asks for.
zpool create -o ashift=12 -o autotrim=on -O mountpoint=none -O atime=off -O compression=zstd -O xattr=sa tank /dev/vdb
# The list of pools to import at boot lies on the root disk, and must be there after a power cut too.
sync
