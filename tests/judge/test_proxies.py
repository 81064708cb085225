"""The documents' examples for Caddy and nginx, tested with these programs.

Each program accepts its file, and an evaluation works through it.
"""

import contextlib
import datetime
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from testbed.signing_peer import SigningPeer, answering, wish
from tests.doubles import TIMEOUT_S
from tests.judge.test_serving import address, serving
from tests.packaging.checkout import ROOT
from tests.ports import kept_port
from tests.processes import wait_until

pytestmark = pytest.mark.net

Command = list[str]
Proxy = Callable[[Path, int, str], tuple[Command, Command]]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1; return it and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(1)
    )
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    files = folder / "fullchain.pem", folder / "privkey.pem"
    files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def caddy(folder: Path, port: int, judge: str) -> tuple[Command, Command]:
    """Return the command that checks Caddy's file and the command that runs Caddy."""
    program = shutil.which("caddy") or pytest.skip("caddy is not installed")
    chain, key = certificate(folder)
    text = (ROOT / "packaging" / "Caddyfile.example").read_text()
    site = f"https://127.0.0.1:{port} {{\n\ttls {chain} {key}\n"
    text = replaced(text, ("{$DOMAIN:judge.example} {\n", site), ("{$JUDGE:127.0.0.1:8400}", judge)).replace(
        "https://judge.example", ""
    )
    text = replaced(text, ("{\n\tservers {", "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers {"))
    (folder / "Caddyfile").write_text(text)
    file = ["--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    return [program, "validate", *file], [program, "run", *file]


def nginx(folder: Path, port: int, judge: str) -> tuple[Command, Command]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or pytest.skip(
        "nginx is not installed"
    )
    chain, key = certificate(folder)
    text = (ROOT / "packaging" / "nginx.example.conf").read_text()
    paths = (
        ("/etc/ssl/judge.example/fullchain.pem", str(chain)),
        ("/etc/ssl/judge.example/privkey.pem", str(key)),
    )
    here = ("listen 443", f"listen 127.0.0.1:{port}"), ("server 127.0.0.1:8400", f"server {judge}")
    (folder / "judge.conf").write_text(replaced(text, *paths, *here))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.getuid() == 0 else ""  # so that nginx can read this folder
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid {folder}/pid; error_log stderr; events {{}}"
        f" http {{ access_log off; {places} include {folder}/judge.conf; }}"
    )
    file = ["-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"]
    return [program, "-t", *file], [program, *file]


@contextlib.contextmanager
def running(command: Command, port: int, folder: Path) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=home(folder))
    try:

        def listens() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        wait_until(listens)
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def home(folder: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}


@pytest.mark.parametrize("proxy", [caddy, nginx])
def test_an_evaluation_works_through_the_proxy(tmp_path: Path, proxy: Proxy) -> None:
    with kept_port() as port:
        evaluate_through(proxy, port, tmp_path)


def evaluate_through(proxy: Proxy, port: int, tmp_path: Path) -> None:
    origin = f"https://127.0.0.1:{port}"
    proxy(tmp_path, port, "127.0.0.1:1")  # skips, if at all, before a judge is started
    with serving(tmp_path / "judge", "--proxy", "127.0.0.1", "--origin", origin) as (_, ready):
        check, run = proxy(tmp_path, port, "{}:{}".format(*address(ready)))
        checked = subprocess.run(
            check, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=home(tmp_path)
        )
        assert checked.returncode == 0, checked.stderr
        trust = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
        peer = SigningPeer(1, origin)
        with (
            running(run, port, tmp_path),
            httpx2.Client(base_url=origin, verify=trust, trust_env=False, timeout=TIMEOUT_S) as client,
        ):
            asked = client.post(ask := "/v1/evaluations", **peer.signed(ask, wish()))
            assert asked.status_code == 201, asked.text
            target = f"{ask}/{asked.json()['evaluations'][0]['evaluation']}/answers"
            graded = client.post(target, **peer.signed(target, answering("x")))
            assert (graded.status_code, graded.json()["answered"]) == (200, 1)
            assert client.get("/").status_code == 200
            # Caddy 2.6 answers a request that it cuts off with status 502. The judge closes such a
            # connection, so a proxy may lose the body of the judge's answer.
            with client.stream("POST", ask, **peer.signed(ask, b" " * 2_000_000)) as cut_off:
                assert cut_off.status_code in (413, 502)
