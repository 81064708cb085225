"""What the page "Join" shows of the operator's invitation."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from swarmd.config.invitation import as_link, read_invitation


def context(invitation: str) -> Mapping[str, Any]:
    """Of an invitation that `read_invitation` takes; "": there is none."""
    if not invitation:
        return {"invitation": "", "named": [], "code": None}
    read = read_invitation(invitation)
    named = [("Swarm", read.name), ("Questions", read.curriculum), ("Model", read.model), ("Judge", read.judge)]
    named.append(("Dialled first", ", ".join(read.bootstrap)))
    return {"invitation": invitation, "named": named, "code": _code(as_link(invitation))}


def _code(text: str) -> Markup | None:
    """A QR code as SVG; None where segno is not installed (the extra `qr`)."""
    try:
        import segno
    except ImportError:
        return None
    return Markup(segno.make(text, error="l", micro=False).svg_inline(scale=4, dark="#000", light="#fff"))  # noqa: S704 - of modules alone
