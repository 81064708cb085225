"""HTTP servers on loopback that end with the test that started them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Calls `get` for GET and HEAD, and `post` for POST."""

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    do_HEAD = do_GET  # noqa: N815  http.server requires this name

    def answer(self, body: object = b"", status: int = 200, **headers: object) -> None:
        """Send bytes, or a value as JSON. headers: `_` in a name becomes `-`; None omits a header."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        if content is not body:
            headers = {"Content_Type": "application/json"} | headers
        for name, value in ({"Content_Length": len(content)} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing on the terminal."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve with this handler; yield the server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
