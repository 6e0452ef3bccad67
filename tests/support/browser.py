"""A headless Chromium, spoken to by the DevTools protocol over a pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CHROMIUM = shutil.which("chromium")
WAIT_SECONDS = 40
_AS_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in one browser; ``problems`` are what it put on its console, or threw."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (read, write)]    # away from 3 and 4
        os.close(read)
        os.close(write)
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--remote-debugging-pipe", "--disable-dev-shm-usage",
                 f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _AS_3_AND_4, *map(str, far), *words], pass_fds=far,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        for end in far:
            os.close(end)
        self._pending, self._number, self._session, self._events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        """Ends it and everything that it started."""
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)      # it goes when its pipe does
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)        # a group of its own
        self._process.wait()
        self._profile.cleanup()

    def call(self, method, **parameters):
        """A command's result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content):]
        answer = self._until(lambda told: told.get("id") == self._number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, wanted):
        end = time.monotonic() + WAIT_SECONDS
        while True:
            while b"\0" in self._pending:
                line, self._pending = self._pending.split(b"\0", 1)
                told = json.loads(line)
                self._events.append(told)
                if wanted(told):
                    return told
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {WAIT_SECONDS} s")
            got = os.read(self._from, 1 << 20)
            if not got:
                raise EOFError(f"the browser is gone: {self._process.wait()}")
            self._pending += got

    @property
    def problems(self):
        """What went wrong in the page: errors and warnings of its console, exceptions."""
        found = []
        for event in self._events:
            values = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(values["exceptionDetails"].get("exception", {}).get("description", values))
            if event.get("method") == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append([each.get("value") for each in values["args"]])
            if event.get("method") == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(values["entry"]["text"])
        return found

    def open(self, path, width=1400, height=900, dark=False, fragment=""):
        """Loads a file, and waits until it has drawn."""
        self._events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self._until(lambda told: told.get("method") == "Page.loadEventFired")
        self.frame()

    def frame(self):
        """Waits for what is drawn next."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression):
        """What an expression is worth in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector):
        """What a reader sees of an element."""
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def press(self, *keys):
        """Keys, one after the other, to what has the focus."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def mouse(self, kind, x, y, **more):
        """A mouse event at a place of the page's view."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path):
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={
            "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1})
        path.write_bytes(base64.b64decode(picture["data"]))
