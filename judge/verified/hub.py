"""Fetches weights from the hub that the operator named.

It fetches one file of one commit of a public repository, and of an adapter its configuration too. No token is
sent. A stranger names repository and commit; the operator's address alone says where the request goes. A hub
sends large files from a CDN, so redirects are followed, five at most: on the hub's own host and port, and
else by https to addresses of the internet alone. Such a host is looked up once, and reached by the very
address that was checked.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from ipaddress import ip_address

import httpx2

from judge import config
from judge.verified.evaluator import VerifiedUnusable
from judge.verified.weights_check import UnfitWeights

REDIRECTS = 5
# An adapter_config.json.
MAX_CONFIG_BYTES = 64 * 1024
_ADDRESS = r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~-]+)*"
_NAME_ANOTHER = (
    "Name a commit of a public repository with the weights in one file; no shards. Of an adapter give the"
    " rank (lora_rank)."
)
_LATER = "Name it again later; tell the judge's operator if it recurs."

Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def addresses_of(host: str) -> Sequence[str]:
    """Look up the host's addresses. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [str(address[0]) for *_, address in found]


class Hub:
    def __init__(
        self,
        address: str,
        resolve: Resolve = addresses_of,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Name the hub. transport: None: the network. Raises VerifiedUnusable."""
        self.address = address.rstrip("/")
        if not re.fullmatch(_ADDRESS, self.address):
            raise VerifiedUnusable(
                f"{address} is no address of a hub; give one like https://huggingface.co with --verified-hub."
            )
        self._origin, self._resolve, self._transport = _origin(httpx2.URL(self.address)), resolve, transport

    def source(self, repo: str, commit: str, adapter: bool) -> str:
        """Return the file's address."""
        return f"{self.address}/{repo}/resolve/{commit}/{'adapter_model' if adapter else 'model'}.safetensors"

    async def adapter_config(self, source: str) -> bytes:
        """Fetch the adapter's configuration. Raises UnfitWeights, TimeoutError."""
        async with (
            asyncio.timeout(config.HUB_S),
            self.opened(source.rpartition("/")[0] + "/adapter_config.json") as (size, parts),
        ):
            if size > MAX_CONFIG_BYTES:
                raise UnfitWeights("adapter_config.json is too large", _NAME_ANOTHER)
            return b"".join([part async for part in parts])

    @contextlib.asynccontextmanager
    async def opened(self, source: str) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Open a file; yields its size and its pieces.

        Raises UnfitWeights; TimeoutError where the hub does not answer.
        """
        headers = {"accept-encoding": "identity", "user-agent": "swarmd-judge"}
        async with httpx2.AsyncClient(
            trust_env=False, timeout=None, headers=headers, transport=self._transport
        ) as client:
            try:
                async with asyncio.timeout(config.HUB_S):
                    response = await self._answer(client, httpx2.URL(source))
                try:
                    yield _size(response), response.aiter_raw()
                finally:
                    await response.aclose()
            except TimeoutError:
                raise
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
                # The last error is raised for a malformed host name.
                raise UnfitWeights(f"the hub cannot be reached ({type(error).__name__})", _LATER) from None

    async def _answer(self, client: httpx2.AsyncClient, url: httpx2.URL) -> httpx2.Response:
        """Follow redirects, and return the last response."""
        for _ in range(REDIRECTS + 1):
            response = await client.send(await self._request(client, url), stream=True)
            if not response.has_redirect_location:
                return response
            await response.aclose()
            url = url.join(response.headers["location"])
        raise UnfitWeights("the hub redirects without end", _LATER)

    async def _request(self, client: httpx2.AsyncClient, url: httpx2.URL) -> httpx2.Request:
        if _origin(url) == self._origin:
            return client.build_request("GET", url)
        addresses = await self._resolve(url.host) if url.scheme == "https" else []
        if not addresses or not all(ip_address(address).is_global for address in addresses):
            raise UnfitWeights("the hub redirects to a host where this judge fetches nothing", _LATER)
        pinned = url.copy_with(host=addresses[0])
        return client.build_request(
            "GET", pinned, headers={"host": url.netloc.decode()}, extensions={"sni_hostname": url.host}
        )


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _size(response: httpx2.Response) -> int:
    if response.status_code in (401, 403, 404):
        name = response.request.url.path.rpartition("/")[2]
        raise UnfitWeights(
            f"the hub gives no {name} of this commit to everybody (HTTP {response.status_code})",
            _NAME_ANOTHER,
        )
    if response.status_code != 200:
        raise UnfitWeights(f"the hub answered with HTTP {response.status_code}", _LATER)
    length = response.headers.get("content-length", "")
    if not re.fullmatch("[0-9]{1,15}", length):
        raise UnfitWeights("the hub does not say how large the file is", _LATER)
    return int(length)
