#!/usr/bin/env bash
# In the guest: Incus with the storage pool `kiln` on tank/incus. Networks are the business of who needs one.
set -euo pipefail
incus admin waitready --timeout=120
if incus storage show kiln >/dev/null 2>&1; then exit 0; fi
incus storage create kiln zfs source=tank/incus >/dev/null
