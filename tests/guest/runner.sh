#!/usr/bin/env bash
# In the guest: runs what the host drops in the queue, one after the other, and says when this boot is ready for it.
# A job is q/NAME.limit (seconds) and q/NAME.sh, in this order; the answer is out/NAME.log and then out/NAME.rc.
set -u

share=/share
jobs=/run/kiln-guest
mkdir -p "$jobs"
cd /root || exit

# Whatever the boot before did not get to is lost, as the host knows.
rm -f "$share"/q/*
# A wait that starts no process: where each instruction is emulated, a `sleep` is dear.
mkfifo -m 600 "$jobs/never" 2>/dev/null
exec 9<>"$jobs/never"

{ cat /proc/sys/kernel/random/boot_id; cut -d' ' -f1 /proc/uptime; } >"$share/boot.new"
mv -f "$share/boot.new" "$share/boot"

while :; do
    for job in "$share"/q/*.sh; do
        [[ -e $job ]] || continue
        name=${job##*/}
        name=${name%.sh}
        limit=$(<"$share/q/$name.limit")
        mv -f "$job" "$jobs/$name.sh"
        timeout --kill-after=10 "$limit" bash "$jobs/$name.sh" >"$share/out/$name.log" 2>&1 </dev/null 9>&-
        printf '%s\n' "$?" >"$share/out/$name.rc.new"
        mv -f "$share/out/$name.rc.new" "$share/out/$name.rc"
    done
    read -r -t 0.2 -u 9
done
