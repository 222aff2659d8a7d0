#!/usr/bin/env bash
# hand_procedure.sh SSH_CONFIG HOST UNIT NEW_UNIT_FILE PORT GPU - one rollout as people do it by hand.
#
# Stop, kill what is left, free the GPU, wait a little, write the unit, start, wait, ask. In one ssh
# session, which is faster than a person: the comparison is with the procedure at its best. Its exit
# status is curl's: 0 when the new server answers within twenty seconds.
set -u
config=$1 host=$2 unit=$3 file=$4 port=$5 gpu=$6
exec ssh -F "$config" -o ConnectTimeout=10 "$host" bash -s -- "$unit" "$port" "$gpu" "$(base64 -w0 "$file")" <<'REMOTE'
unit=$1 port=$2 gpu=$3 text=$4
systemctl stop "$unit"
systemctl kill -s KILL "$unit" 2>/dev/null
fuser -k -s "/dev/nvidia$gpu"
sleep 2
base64 -d <<<"$text" >"/etc/systemd/system/$unit"
systemctl daemon-reload
systemctl reset-failed "$unit" 2>/dev/null
systemctl start "$unit"
for _ in $(seq 20); do
  curl -sf -o /dev/null -m 5 -H 'Content-Type: application/json' -d '{"prompt":"hello","max_tokens":1}' "http://127.0.0.1:$port/v1/completions" && exit 0
  sleep 1
done
exit 1
REMOTE
