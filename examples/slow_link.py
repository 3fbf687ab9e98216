"""A slow link between the processes of one machine: a network namespace of their own, whose only device is slow.

Needs Linux and the commands ip, tc and unshare, but no privileges where user namespaces are allowed.
"""

import os
import shutil
import subprocess
import sys

_INSIDE = "SPARSECOMM_SLOW_LINK"


def enter(megabits: int, processes: int) -> str | None:
    """Starts this program again behind a slow link, unless it runs there already.

    Args:
        megabits: Rate at which each process can send, in Mbit/s.
        processes: How many there are. All send through one device, so it has that many times the rate.

    Returns:
        None behind the link; else why this machine does not allow one.
    """
    if os.environ.get(_INSIDE):
        return None
    # Where Debian keeps ip and tc, and an ordinary user's path does not lead.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [command for command in ("unshare", "ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"commands are missing: {', '.join(missing)} (packages iproute2 and util-linux)"
    # What the device sends at once, and how long a packet waits before it is dropped.
    bits = megabits * processes * 10**6
    shape = f"tc qdisc add dev lo root tbf rate {bits}bit burst {max(3000, bits // 4000)} latency 400ms"
    set_up = f"ip link set lo mtu 1500 up && {shape}"
    # The first works for any user, the second for root in containers that allow no user namespaces.
    refused = ""
    for unshare in (["unshare", "--user", "--map-root-user", "--net"], ["unshare", "--net"]):
        tried = subprocess.run([*unshare, "sh", "-c", set_up], capture_output=True, text=True)
        if tried.returncode == 0:
            # torch warns that hosts in there have no names.
            quiet = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
            os.environ |= {_INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": quiet}
            os.execvp("unshare", [*unshare, "sh", "-c", f'{set_up} && exec "$@"', "sh", sys.executable, *sys.argv])
        refused = refused or tried.stderr.strip().splitlines()[-1]
    # unshare's own words; these are what it says of a limit on their number.
    number = "No space left on device" in refused
    remedy = "sysctl -w user.max_user_namespaces=10000, as root" if number else "run it as root, outside of a container"
    return f"network namespaces are not allowed here ({refused}). To allow them: {remedy}"
