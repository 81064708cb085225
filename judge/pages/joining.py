"""What the page "Join" shows: the operator's invitation, and the page's own address as a QR code."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from swarmd.config.invitation import read_invitation
from swarmd.tasks.curriculum import Curriculum


def context(invitation: str, curriculum: Curriculum, address: str) -> Mapping[str, Any]:
    """Of an invitation that `read_invitation` takes; "": there is none. `address`: of this page, as others reach it."""
    if not invitation:
        return {"invitation": "", "named": [], "code": None, "address": address}
    read = read_invitation(invitation)
    named = [("Swarm", read.name), ("Questions", read.curriculum), ("Model", read.model), ("Judge", read.judge)]
    named += [("Dialled first", ", ".join(read.bootstrap)), ("Swarm digest", read.digest), ("Questions digest", curriculum.digest)]
    return {"invitation": invitation, "named": named, "code": _code(address), "address": address}


def _code(text: str) -> Markup | None:
    """A QR code as SVG that scales with its box; None where segno is not installed (the extra `qr`)."""
    try:
        import segno
    except ImportError:
        return None
    drawn = segno.make(text, error="m", micro=False).svg_inline(scale=4, dark="#000", light="#fff", omitsize=True)
    return Markup(drawn)  # noqa: S704 - of modules alone
