"""Composes the invitation to a node's swarm, without addresses that only this machine can use."""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from p2p.address import parse_bootstrap, parse_endpoint
from p2p.netgroup import only_here
from swarmd.config.config import NodeConfig
from swarmd.config.invitation import Invitation, write_invitation
from swarmd.daemon.page.opening import LOOPBACK
from swarmd.errors import ConfigError, Unreachable
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.policy.models.hub import REPOSITORIES, is_folder
from swarmd.tasks.curriculum import Curriculum

# Maximum number of addresses in an invitation, to keep it short.
MAX_ADDRESSES: Final = 3
PLACES: Final = ("internet", "network", "machine")  # from where an address can be dialled


def invite(config: NodeConfig, curriculum: Curriculum | None, own: Sequence[str] = ()) -> dict[str, Any]:
    """Return the invitation as a document, with notes for the person who hands it on.

    Candidates are the node's own addresses and its bootstrap addresses. The invitation names those on the
    internet if there are any, else those on the local network, else those on this machine. Of the node's own
    internet addresses it names one IPv4 and one IPv6 address.

    Args:
        curriculum: None for a bootstrap node, which serves every curriculum and model.
        own: the node's addresses; empty if it is not running.

    Raises:
        ConfigError: the node is in no swarm.
        Unreachable: no address is known.
    """
    if config.swarm.engine == "none":
        raise ConfigError(
            'swarm.engine is "none": this node trains alone, so there is no swarm to invite to. Set it to'
            ' "libp2p".'
        )
    usable = [*filter(_can_be_invited_to, own)]
    public = {address.split("/")[1]: address for address in reversed(usable) if place(address) == "internet"}
    near = [address for address in usable if place(address) != "internet"]
    known = dict.fromkeys([*sorted(public.values()), *config.swarm.bootstrap, *near])
    where = min(map(place, known), key=PLACES.index, default="")
    # Do not add nearer addresses: on the invited machine a loopback or private one means another machine.
    addresses = tuple(address for address in known if place(address) == where)[:MAX_ADDRESSES]
    if not addresses:
        raise Unreachable(
            "the node has no address that other nodes could dial, and no bootstrap address is configured. Ask"
            " again in a moment; if it stays so, `swarmd doctor network` says why."
        )
    model, notes = "", []
    if curriculum is not None:
        model = next(
            (short for short, repository in REPOSITORIES.items() if repository == config.model.name),
            config.model.name,
        )
    if model and is_folder(model):
        notes.append(
            f"the model {model} is a folder of this machine, so the invitation names none: others say it with"
            " --model"
        )
        model = ""
    if where != "internet":
        notes.append(
            "no address in it can be dialled from the internet: it is good on"
            f" {'this machine' if where == 'machine' else 'your network'} alone. `swarmd doctor network`"
            " helps"
        )
    judge = config.judge.url
    if urlsplit(judge).hostname in LOOPBACK and where != "machine":
        notes.append(
            f"the judge {judge} is at an address of this machine alone, so the invitation names none: others"
            " say it with --judge, by an address that they reach"
        )
        judge = ""
    name, digest = (curriculum.name, swarm_digest(curriculum)) if curriculum is not None else ("", "")
    made = Invitation(config.swarm.name, name, digest, model, addresses, judge)
    return {"schema": 1, "invitation": write_invitation(made), "notes": notes}


def place(address: str) -> str:
    """Return from where an address can be dialled: "machine", "network" or "internet".

    Only the address itself is considered.
    """
    if (endpoint := parse_endpoint(address)) is None or only_here(address):
        return "machine"
    if endpoint.kind.startswith("dns"):
        return "internet"
    return "internet" if ip_address(endpoint.host).is_global else "network"


def _can_be_invited_to(address: str) -> bool:
    try:
        return bool(parse_bootstrap(address))
    except ValueError:
        return False
