"""Lab hosts: machines with a real systemd, a real sshd and simulated GPUs, made of namespaces.

The Python face of the scripts in `scripts/` (which say what each piece is and need nothing of this
package). Serves `reconcile lab`, `reconcile rehearse` and the tests. A lab lives in one directory;
its bridge, its addresses, its control groups and its namespaces are named after that directory, so
labs never meet, and nothing else on the machine is touched. What an unclean end left behind is
taken away at the next boot. What a lab host cannot show: no driver, no CUDA, no real nvidia-smi.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reconciler.core.errors import HostError, UsageError
from reconciler.transports.base import Completed

SCRIPTS = Path(__file__).parent / "scripts"
"""Called as `bash SCRIPT` or `python3 SCRIPT`: what installs a wheel need not keep modes."""

DEFAULT_DIRECTORY = Path("/run/reconciler-lab")
"""A lab does not survive a reboot, and neither does this."""

TREE_CACHE = Path("/var/cache/reconciler-lab")
"""Debian trees that the containers of Proxmox-like hosts boot from, one a recipe, never written to."""

BOOT_DEADLINE_S = 180
"""A boot takes 2 s on an idle machine and 27 s when twenty boot at once on two cores."""

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,9}")
"""At most ten characters: with the lab's tag before it, an interface's name has no more room."""


@dataclass(frozen=True, slots=True)
class LabPaths:
    """One lab: where it lives, and the names that are its own on this machine."""

    directory: Path
    net: str
    bridge: str
    cgroup: str
    tag: str

    @classmethod
    def at(cls, directory: Path) -> LabPaths:
        """Name the lab of `directory`: the same names as long as nobody else holds its subnet."""
        directory = directory.absolute()
        digest = hashlib.sha256(str(directory).encode()).hexdigest()
        tag = digest[:3]
        octet = _free_octet(directory, first=int(digest[3:11], 16))
        return cls(
            directory=directory,
            net=f"10.213.{octet}",
            bridge=f"lab{octet}",
            cgroup=f"reconcile-lab-{digest[:8]}",
            tag=tag,
        )

    @property
    def inventory(self) -> Path:
        """The `Host` documents of the running hosts, as specs understand them."""
        return self.directory / "inventory.yaml"

    @property
    def known_hosts(self) -> Path:
        """The pinned keys of the running hosts."""
        return self.directory / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """An OpenSSH client configuration that names every host, its key and `known_hosts`."""
        return self.directory / "ssh_config"

    def host_directory(self, name: str) -> Path:
        """Where the scripts keep what belongs to one running host."""
        return self.directory / "run" / name

    def environment(self) -> dict[str, str]:
        """Return the environment that the scripts run in: no more of the caller's than PATH."""
        return {
            "PATH": os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "LAB_DIR": str(self.directory),
            "LAB_NET": self.net,
            "LAB_BRIDGE": self.bridge,
            "LAB_CG": self.cgroup,
            "LAB_TAG": self.tag,
        }

    def script(
        self,
        name: str,
        *arguments: str,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run one script to its end and return what it printed.

        Raises:
            HostError: It failed or passed its deadline; the message is its last words.
        """
        command = ["bash", str(SCRIPTS / name), *arguments]
        try:
            done = subprocess.run(  # noqa: S603 - our own script; arguments are separate words
                command,
                env={**self.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError("lab", f"{name} did not end within {deadline_s:g} s") from error
        if done.returncode != 0:
            said = (
                "\n".join(done.stderr.strip().splitlines()[-20:])
                or f"exit status {done.returncode}"
            )
            raise HostError("lab", f"{' '.join([name, *arguments])}: {said}")
        return done.stdout

    def running(self) -> tuple[SystemdHost, ...]:
        """Return the hosts that are up, sorted by name."""
        found = []
        for directory in sorted(self.directory.glob("run/*")):
            if directory.is_dir() and NAME.fullmatch(directory.name):
                host = SystemdHost(directory.name, self)
                if host.alive():
                    found.append(host)
        return tuple(found)

    def stop_all(self) -> None:
        """End every host of this lab, and what an unclean end left of them."""
        if self.directory.exists():
            self.script("stop-host.sh", "--all", deadline_s=BOOT_DEADLINE_S)
            self.write_inventory()

    def write_inventory(self) -> None:
        """Write `inventory.yaml`, `known_hosts` and `ssh_config` for the hosts that run now; with the last host they go."""
        hosts = self.running()
        if not hosts:
            for path in (self.known_hosts, self.inventory, self.ssh_config):
                path.unlink(missing_ok=True)
            return
        _write(
            self.known_hosts,
            "".join(f"{h.ip} {h.host_key}\n{h.name} {h.host_key}\n" for h in hosts),
        )
        _write(self.inventory, "---\n".join(_host_documents(host) for host in hosts))
        _write(self.ssh_config, "".join(_ssh_stanza(host) for host in hosts))


@dataclass(frozen=True, slots=True)
class SystemdHost:
    """A running lab host, known by its name in its lab."""

    name: str
    lab: LabPaths

    @classmethod
    def boot(
        cls,
        name: str,
        *,
        lab: LabPaths,
        gpus: int = 2,
        gpu_mib: int = 24576,
        binds: Sequence[str] = (),
        users: Sequence[str] = (),
        host_key: Path | None = None,
    ) -> SystemdHost:
        """Boot one host and return it when its systemd says `running`.

        `binds` are `SRC[:DST]`, read-only; `users` are ordinary users who may log in with the lab's
        key. Raises `HostError` with the end of its console when it does not come up; nothing of it
        is left then.
        """
        _check_name(name)
        options = ["--base", "host", *_boot_options(gpus, gpu_mib, binds, users, host_key)]
        lab.directory.mkdir(parents=True, exist_ok=True)
        lab.script("boot-host.sh", name, *options, deadline_s=BOOT_DEADLINE_S)
        lab.write_inventory()
        return cls(name, lab)

    @property
    def directory(self) -> Path:
        """Where the scripts keep what belongs to this host."""
        return self.lab.host_directory(self.name)

    @property
    def ip(self) -> str:
        """Its address on the lab's bridge."""
        return (self.directory / "ip").read_text().strip()

    @property
    def port(self) -> int:
        """The port of its sshd."""
        return 22

    @property
    def user(self) -> str:
        """Who logs in with `key_path`."""
        return "root"

    @property
    def key_path(self) -> Path:
        """The private key that root accepts."""
        return self.directory / "id_ed25519"

    @property
    def host_key(self) -> str:
        """The public host key, `ssh-ed25519 AAAA…`, to be pinned."""
        words = (self.directory / "ssh_host_ed25519_key.pub").read_text().split()
        return " ".join(words[:2])

    @property
    def container(self) -> tuple[int, str] | None:
        """VMID and address of its container, when it was booted as a Proxmox-like host."""
        try:
            vmid, address = (self.directory / "container").read_text().split()
        except OSError:
            return None
        return int(vmid), address

    @property
    def root(self) -> Path:
        """Its file system, seen from this machine; /dev, /run and /proc of the host are not in it."""
        return self.directory / "mem" / "root"

    @property
    def leader(self) -> int:
        """Its PID 1, as this machine numbers it."""
        return int((self.directory / "leader").read_text())

    def alive(self) -> bool:
        """Say whether it runs: a recorded pid counts only inside the host's own control group."""
        try:
            groups = Path(f"/proc/{self.leader}/cgroup").read_text()
            state = Path(f"/proc/{self.leader}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return False
        own = rf"/{re.escape(self.lab.cgroup)}/{re.escape(self.name)}(/|$)"
        return state not in "ZX" and re.search(own, groups, re.MULTILINE) is not None

    def exec(self, argv: Sequence[str], stdin: bytes = b"", *, deadline_s: float = 60) -> Completed:
        """Run a command as root inside, by namespaces: the lab's own way in, not the product's."""
        return _run(
            self, ["bash", str(SCRIPTS / "host-exec.sh"), self.name, *argv], stdin, deadline_s
        )

    def check(self, argv: Sequence[str], stdin: bytes = b"", *, deadline_s: float = 60) -> str:
        """Run a command as `exec` does and return its output; `HostError` when it fails."""
        return _checked(self.name, argv, self.exec(argv, stdin, deadline_s=deadline_s))

    def network(self, fault: str, *arguments: str) -> None:
        """Break or heal its network from outside: `cut`, `reset`, `loss 20`, `link-down`, `heal`."""
        self.lab.script("net-fault.sh", self.name, fault, *arguments, deadline_s=20)

    def stop(self, *, hard: bool = False) -> None:
        """End it and remove all it left; `hard` skips the orderly power-off. Safe to repeat."""
        options = ["--hard"] if hard else []
        self.lab.script("stop-host.sh", *options, self.name, deadline_s=BOOT_DEADLINE_S)
        self.lab.write_inventory()


@dataclass(frozen=True, slots=True)
class ProxmoxHost:
    """A Proxmox-like host: `outer` runs sshd and `pct`, the container `vmid` runs systemd and servers."""

    outer: SystemdHost
    vmid: int
    container_ip: str

    @classmethod
    def boot(
        cls,
        name: str,
        *,
        lab: LabPaths,
        gpus: int = 2,
        gpu_mib: int = 24576,
        binds: Sequence[str] = (),
        host_key: Path | None = None,
        vmid: int = 101,
    ) -> ProxmoxHost:
        """Boot the host and its container; builds the container's tree first when no cache has it."""
        _check_name(name)
        tree = build_tree(lab)
        options = [
            "--base",
            "host",
            "--ct-base",
            str(tree),
            "--vmid",
            str(vmid),
            *_boot_options(gpus, gpu_mib, binds, (), host_key),
        ]
        said = lab.script("boot-pve.sh", name, *options, deadline_s=BOOT_DEADLINE_S)
        address = said.split()[-1]
        outer = SystemdHost(name, lab)
        (outer.directory / "container").write_text(f"{vmid} {address}\n")
        lab.write_inventory()
        return cls(outer, vmid, address)

    @property
    def name(self) -> str:
        """The outer host's name."""
        return self.outer.name

    @property
    def ip(self) -> str:
        """The outer host's address."""
        return self.outer.ip

    @property
    def key_path(self) -> Path:
        """The private key that root of the outer host accepts."""
        return self.outer.key_path

    @property
    def host_key(self) -> str:
        """The outer host's public host key."""
        return self.outer.host_key

    def exec(self, argv: Sequence[str], stdin: bytes = b"", *, deadline_s: float = 60) -> Completed:
        """Run a command as root inside the container, as `pct exec` does."""
        return self.outer.exec(
            ["pct", "exec", str(self.vmid), "--", *argv], stdin, deadline_s=deadline_s
        )

    def check(self, argv: Sequence[str], stdin: bytes = b"", *, deadline_s: float = 60) -> str:
        """Run a command as `exec` does and return its output; `HostError` when it fails."""
        return _checked(self.name, argv, self.exec(argv, stdin, deadline_s=deadline_s))

    def stop(self, *, hard: bool = False) -> None:
        """End container and host. Safe to repeat."""
        self.outer.stop(hard=hard)


def available(*, pve: bool = False) -> tuple[str, ...]:
    """Say what keeps this machine from running lab hosts; empty when nothing does.

    With `pve`, also what a Proxmox-like host needs beyond that.
    """
    programs = {
        "systemd-nspawn": "systemd-container",
        "/usr/lib/systemd/systemd": "systemd",
        "/usr/sbin/sshd": "openssh-server",
        "/usr/bin/dbus-daemon": "dbus",
        "/usr/bin/fuser": "psmisc",
        "/usr/bin/python3": "python3",
        "ip": "iproute2",
        "findmnt": "util-linux",
    }
    if pve:
        programs["lxc-start"] = "lxc"
        programs["mmdebstrap"] = "mmdebstrap"
    missing = [
        f"{program} is missing (package {package})"
        for program, package in programs.items()
        if not shutil.which(program)
    ]
    if os.geteuid() != 0:
        missing.append("needs root: it makes namespaces, mounts and device nodes")
    if not Path("/bin").is_symlink():
        missing.append("needs a merged /usr (/bin is not a link to /usr/bin)")
    if not any(
        " - cgroup2 " in line for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ):
        missing.append("no cgroup v2 hierarchy is mounted")
    return tuple(missing)


def build_tree(lab: LabPaths) -> Path:
    """Return the Debian tree that containers boot from; build it where no cached one fits.

    Takes 2 to 4 minutes when it must be built (packages come from this machine's own Debian mirror).
    """
    lab.directory.mkdir(parents=True, exist_ok=True)
    said = lab.script("build-rootfs.sh", deadline_s=900, environment={"LAB_CACHE": str(TREE_CACHE)})
    return Path(said.splitlines()[-1])


def _boot_options(
    gpus: int, gpu_mib: int, binds: Iterable[str], users: Iterable[str], host_key: Path | None
) -> list[str]:
    options = ["--gpus", str(gpus), "--gpu-mib", str(gpu_mib)]
    for bind in binds:
        options += ["--bind-ro", bind]
    for user in users:
        options += ["--user", user]
    if host_key is not None:
        options += ["--host-key", str(host_key)]
    return options


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"lab: {name!r} is no name for a lab host: use at most ten of a-z, 0-9 and '-', as in 'gpu1'"
        )


def _run(host: SystemdHost, command: Sequence[str], stdin: bytes, deadline_s: float) -> Completed:
    try:
        done = subprocess.run(  # noqa: S603 - our own script; arguments are separate words
            list(command),
            env=host.lab.environment(),
            input=stdin,
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(
            host.name, f"no end of {' '.join(command[3:])!r} within {deadline_s:g} s"
        ) from error
    return Completed(done.stdout, done.stderr, done.returncode)


def _checked(host: str, argv: Sequence[str], done: Completed) -> str:
    if done.exit_status != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise HostError(host, f"{' '.join(argv)!r} ended with {done.exit_status}: {said[-2000:]}")
    return done.stdout.decode(errors="replace")


def _free_octet(directory: Path, first: int) -> int:
    """Choose the third number of the lab's subnet: its own bridge's, else one that nobody has.

    Numbers from 100 on, so that labs booted by hand with the scripts' defaults are out of the way.
    """
    taken = _subnets_in_use()
    for step in range(150):
        octet = 100 + (first + step) % 150
        with suppress(OSError):
            alias = Path(f"/sys/class/net/lab{octet}/ifalias").read_text().strip()
            if alias == f"reconcile lab {directory}":
                return octet
            continue
        if f"10.213.{octet}" not in taken:
            return octet
    raise HostError(
        "lab", "every subnet from 10.213.100.0/24 to 10.213.249.0/24 is in use on this machine"
    )


def _subnets_in_use() -> set[str]:
    """Return the first three numbers of every route's destination on this machine."""
    lines = Path("/proc/net/route").read_text().splitlines()[1:]
    fields = [bytes.fromhex(line.split()[1])[::-1] for line in lines]
    return {".".join(str(number) for number in destination[:3]) for destination in fields}


def _host_documents(host: SystemdHost) -> str:
    header = "apiVersion: reconciler/v1\nkind: Host\n"
    ssh = f"ssh: {{address: {host.ip}, user: {host.user}, port: {host.port}}}\n"
    if host.container is None:
        return f"{header}name: {host.name}\n{ssh}"
    vmid, _ = host.container
    return f"{header}name: {host.name}\nproxmox: {{vmid: {vmid}, ssh: {{address: {host.ip}, user: {host.user}, port: {host.port}}}}}\n"


def _ssh_stanza(host: SystemdHost) -> str:
    return (
        f"Host {host.name} {host.ip}\n"
        f"  HostName {host.ip}\n"
        f"  User {host.user}\n"
        f"  IdentityFile {host.key_path}\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {host.lab.known_hosts}\n"
        "  StrictHostKeyChecking yes\n"
    )


def _write(path: Path, text: str) -> None:
    """Replace `path` in one step: two boots at once must not leave half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
