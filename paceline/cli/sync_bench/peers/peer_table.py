"""The peers by name: which module moves the weights, and in which order trainer and replicas do their parts.

together   all at once; they wait for each other inside (a collective)
after      the trainer first, then all replicas at the same time
alone      one process does it all and starts the others itself
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from paceline.core.errors import ConfigError

Order = Literal["together", "after", "alone"]
_ROOM = "paceline.cli.sync_bench.peers"


class PeerEntry(NamedTuple):
    """`module` has `build(setup, shapes)`, which makes one side of the peer (`peer_process.PeerSide`)."""

    module: str
    order: Order


PEERS = {
    "gloo_broadcast": PeerEntry(f"{_ROOM}.gloo_broadcast", "together"),
    "safetensors_shm": PeerEntry(f"{_ROOM}.safetensors_shm", "after"),
    "reference_flow": PeerEntry(f"{_ROOM}.reference_flow", "together"),
    "ray_numpy": PeerEntry(f"{_ROOM}.ray_numpy", "alone"),
    "ray_torch": PeerEntry(f"{_ROOM}.ray_torch", "alone"),
}


def chosen_peers(text: str) -> tuple[str, ...]:
    """The peers of an option's value: "all", "none" or names with commas between them.

    Raises:
        ConfigError: a name that is none.
    """
    if text in ("all", "none"):
        return tuple(PEERS) if text == "all" else ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise ConfigError(
            f"--peers: {', '.join(unknown) or 'nothing'} is no peer; there are all, none, {', '.join(PEERS)}"
        )
    return names
