"""Decides which requests to the node's page are allowed. Pure.

The page listens on loopback. Every program on this machine, and every web page open in its browsers, can send
requests there. So there are three rules:

- The Host header names loopback. A hostile web site that points its name at 127.0.0.1 (DNS rebinding) sends
  its own name there.
- The Origin header, if the browser sends one, is the page's own origin. Pages of other servers are refused,
  including servers on other ports of this machine.
- The request has the token that only `swarmd ui` prints. There is no cookie: a browser sends cookies to every
  port of a host, including another user's server. The page is opened with the token in its address; requests
  that change something need the token in a header, which no other origin can set.
"""

import hmac
from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def foreign(headers: Mapping[str, str]) -> str | None:
    """Return why a request cannot come from this machine's own page, or None if it may.

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
