"""Dials the addresses of an invitation, so that the page "Join" and `check` can say whether they answer."""

from collections.abc import Mapping, Sequence

from p2p.address import parse_bootstrap
from swarmd.config.invitation import read_invitation


def dial(invitation: str) -> Mapping[str, str]:
    """Return for each address of an invitation why it does not answer; "": it does.

    Each is dialled once, for some seconds at most, and told nothing.
    """
    # Imported here: a judge without an invitation needs no second event loop.
    import trio

    return trio.run(dial_all, read_invitation(invitation).bootstrap)


async def dial_all(addresses: Sequence[str]) -> Mapping[str, str]:
    """Dial these addresses at once (trio), see `dial`."""
    import trio

    from p2p.nat.noise_probe import NoPeer, knock

    found = dict.fromkeys(addresses, "")

    async def note(address: str) -> None:
        peer, endpoint = parse_bootstrap(address)
        try:
            if await knock(endpoint.host, endpoint.port) != peer:
                found[address] = "another peer listens there"
        except NoPeer as error:
            found[address] = str(error)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(note, address)
    return found
