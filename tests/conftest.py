"""What several test files share."""

import os

# Before torch is imported, here and in the programs that tests start: test processes run beside
# each other, and two that both use two threads on two cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest


@pytest.fixture
def server():
    """A web server on this machine; `answers` maps a path to a function of the handler."""
    state = SimpleNamespace(answers={}, requests=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            state.requests.append(SimpleNamespace(
                path=self.path, headers=dict(self.headers), body=body, method=self.command))
            status, headers, body = state.answers[self.path.partition("?")[0]](state)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has read as much as it wants

        do_POST = do_GET

        def log_message(self, *args):
            """Not into the test's output."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    state.base = f"http://127.0.0.1:{httpd.server_address[1]}"
    yield state
    httpd.shutdown()
    httpd.server_close()
