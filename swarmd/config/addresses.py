"""Validators of web addresses in the configuration, without name lookups."""

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from swarmd.config.amounts import checked

_DEFAULT_PORT = {"http": 80, "https": 443}


def web_origin(text: str) -> str:
    """Normalise the address of a web service to scheme://host[:port].

    Raises ValueError if it is not such an address.
    """
    parts = urlsplit(text)
    host, port = parts.hostname or "", parts.port  # raises ValueError if they are malformed
    plain = (
        text.isascii()
        and text.isprintable()
        and not set(text) & set("?#@%\\ ")
        and ("[" in text) == (":" in host)
    )
    if (
        parts.scheme not in _DEFAULT_PORT
        or not _is_host(host)
        or not plain
        or port == 0
        or parts.path not in ("", "/")
    ):
        raise ValueError(
            "it is not of the form http://host:port or https://host[:port], without a path or a query"
        )
    name = f"[{host}]" if ":" in host else host
    return (
        f"{parts.scheme}://{name}"
        if port in (None, _DEFAULT_PORT[parts.scheme])
        else f"{parts.scheme}://{name}:{port}"
    )


# A text that is empty or the address of a web service.
web_address = checked(web_origin, empty=True)


def host_and_port(text: str) -> str:
    """Normalise to host:port; the host defaults to loopback; "" stays empty.

    Raises ValueError.
    """
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    host = host or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536) or not _is_host(
        host.strip("[]").lower()
    ):
        raise ValueError("it is neither host:port nor a port")
    return f"{host}:{port}"


def _is_host(host: str) -> bool:
    """Return whether `host` is an IP address or a valid host name.

    A text of digits and dots that is not an address is not a host name either.
    """
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        try:
            return bool(ip_address(host))
        except ValueError:
            return False
    return (
        len(host) <= 253
        and re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*\.?", host) is not None
    )
