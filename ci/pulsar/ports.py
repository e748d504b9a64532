"""Ports for brokers that tests end and start again."""

import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different.

    From below those that systems give to outgoing connections: a client that tries again and again to reach a broker
    that is away could get its port, and be connected to itself.
    """
    found = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        if port not in found and not in_use(port):
            found.append(port)
    return found


def in_use(port: int) -> bool:
    with socket.socket() as one:
        # As servers do: what is left of closed connections does not count.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
