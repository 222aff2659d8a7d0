"""The unit that the daemon runs in: its own user, nothing writable but its state, no capability, no device, only the calls of a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STATE: Final = "reconciler-controller"

UNIT: Final = """[Unit]
Description=reconcile: GPU hosts become what the specs say
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=5s
WatchdogSec=120s
# A rollout in its middle is finished first; one that only waits is handed over at once.
TimeoutStopSec=15min
KillMode=mixed
DynamicUser=yes
StateDirectory={state}
StateDirectoryMode=0700
Environment=HOME=/var/lib/{state} RECONCILER_STATE_DIR=/var/lib/{state} RECONCILER_SETTINGS=/etc/reconciler/settings.yaml RECONCILER_LOG=info
UMask=0077
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
PrivateMounts=yes
ProtectHostname=yes
ProtectClock=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectProc=invisible
ProcSubset=pid
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
RemoveIPC=yes
DevicePolicy=closed
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallFilter=prlimit64
SystemCallErrorNumber=EPERM
TasksMax=1024
MemoryMax=2G

[Install]
WantedBy=multi-user.target
"""


def daemon_unit(argv: Sequence[str]) -> str:
    """Render the unit for one command line."""
    return UNIT.format(command=" ".join(_word(a) for a in argv), state=STATE)


def _word(text: str) -> str:
    """Write one word so that systemd reads exactly it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
