#!/usr/bin/env bash
# disk-fault.sh NAME full|heal - leave a running lab host no room on its disk, from outside it.
# The host's / is a tmpfs: its size is set to what is used, so that every write of a new page fails
# with "No space left on device", as on a full disk.  /run, /dev and /usr of the host have room.
set -euo pipefail
. "$(dirname "$0")/lab-env.sh"
need_root
name=${1:?usage: disk-fault.sh NAME full|heal}; how=${2:?full or heal}; check_name "$name"
alive "$name" || die "host $name is not running"
mem=$LAB_RUN/$name/mem
case $how in
  full) mount -o "remount,size=$(stat -f -c '%b %f %S' "$mem" | awk '{print ($1 - $2) * $3}')" "$mem";;
  heal) [ "$(stat -f -c '%b' "$mem")" -gt 1000000 ] || mount -o remount,size=8g "$mem";;
  *) die "unknown fault $how";;
esac
