"""Decides who may ask for the node's page. Pure.

The page listens on loopback, where every program and every web page open on this machine can send it
requests. Three rules:

- Host names loopback. A hostile web site whose name was pointed at 127.0.0.1 (DNS rebinding) sends its own
  name.
- Origin, where a browser sends one, is the page's own. A page of another server is refused, also one on
  another port of this machine.
- The token that only `swarmd ui` prints. There is no cookie: a browser sends cookies to every port of a host,
  so also to the server of another user. A page is opened with the token in its address; whatever changes
  something needs it in a header, which no other origin can set.
"""

import hmac
from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def foreign(headers: Mapping[str, str]) -> str | None:
    """Return why a request must come from elsewhere than this machine's own page, or None.

    headers: names in lower case.
    """
    host = headers.get("host", "")
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if (name if colon else host) not in LOOPBACK or (colon and not (port.isascii() and port.isdigit())):
        return "This address is for this machine alone: open it as http://127.0.0.1 and its port."
    if "origin" in headers and headers["origin"] != f"http://{host}":
        return "Another web page may not ask for this."
    return None


def knows(token: str, given: str) -> bool:
    """Return whether `given` is the token, compared in constant time."""
    return hmac.compare_digest(token.encode(), given.encode(errors="replace"))


def bearer(headers: Mapping[str, str]) -> str:
    """Return the token in the Authorization header; "" without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given if scheme.lower() == "bearer" else ""
