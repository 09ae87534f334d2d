"""A server that speaks the part of vLLM's HTTP protocol that the adapter uses, without a model."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tiny import EOS


class FakeServer:
    """Answers as vLLM does, and keeps what it was asked: (path with query, body)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.version_label = "default"
        self.replies: dict[str, Any] = {}
        self.refuses: set[str] = set()
        self.silent: set[str] = set()
        # Answered with the reply as it is, and not as JSON.
        self.pages: set[str] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Not on the terminal."""

            def do_GET(self) -> None:
                fake.answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                fake.answer(self, json.loads(self.rfile.read(length)) if length else None)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = handler.path.partition("?")[0]
        self.calls.append((handler.path, body))
        if path in self.silent:
            time.sleep(3)
        status = 500 if path in self.refuses else 200
        if path == "/update_weight_version" and status == 200:
            self.version_label = body["new_version"]
        content = {"error": {"message": "worker failed"}} if status == 500 else self.content(path, body)
        data = (content if path in self.pages else json.dumps(content)).encode()
        try:
            handler.send_response(status)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        except ConnectionError:
            """Who asked did not wait."""

    def content(self, path: str, body: Any) -> Any:
        if path in self.replies:
            return self.replies[path]
        if path == "/weight_info":
            return {"weight_version": self.version_label}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/v1/completions":
            seed = body["seed"]
            return {
                "choices": [
                    {
                        "index": j,
                        "token_ids": [seed + j, EOS],
                        "logprobs": {"token_logprobs": [-0.1, -0.30000001192092896]},
                        "finish_reason": "stop",
                    }
                    for j in reversed(range(body["n"]))
                ]
            }
        return {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
