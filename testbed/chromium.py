"""A headless Chromium, controlled with the DevTools protocol over a pair of pipes.

It needs no package besides the browser itself.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed import TIMEOUT_S

BINARIES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def binary() -> str | None:
    return next((path for name in BINARIES if (path := shutil.which(name))), None)


class Tab:
    """A browser tab. `events` holds the browser's reports so far: console messages, requests, dialogs."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._from, 1 << 20)
            if not received:
                raise RuntimeError("the browser ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.run("window.ofThePageBefore = true")
        self.call("Page.navigate", url=address)
        self.until("!window.ofThePageBefore && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or a promise's resolved value."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            letters = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **letters
            )

    def screenshot(self, file: Path) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """Run a browser with an empty profile until the block ends."""
    found = binary()
    assert found is not None
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()

    def as_3_and_4() -> None:
        first, second = os.dup(reads), os.dup(writes)
        os.dup2(first, 3)
        os.dup2(second, 4)

    command = [
        found,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=as_3_and_4, close_fds=False)
    os.close(reads)
    os.close(writes)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
