"""A stub of a vLLM server's management routes, with its faults, for tests that need no real one.

Its models write a given plan for every prompt; a `tokenize` gives the lengths of words. What was asked is kept.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep
from typing import Any

Answer = tuple[int, Any]


@dataclass
class VllmStub:
    """The behaviour of the server."""

    models: list[str]
    plans: dict[str, Callable[[str], str]] = field(default_factory=dict)
    """How each model answers a prompt."""
    adapters: bool = True
    """True if it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    bad: set[str] = field(default_factory=set)
    """Folders that hold no adapter that it could load."""
    delay: float = 0.0
    shift: int = 0
    """Added to every token: another tokenizer."""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: Any) -> Answer:
        """Return the status and the JSON of a reply."""
        self.requests.append((path, body))
        sleep(self.delay)
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        if path == "/tokenize":
            return 200, {"tokens": tokens(body["messages"][0]["content"], self.shift), "count": 1}
        if path == "/v1/chat/completions":
            return self._complete(body)
        if self.adapters and path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return self._manage_adapters(path, body)
        return 404, {"detail": "Not Found"}

    def _complete(self, body: Any) -> Answer:
        if body["model"] not in self.models:
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        text = self.plans[body["model"]](body["messages"][-1]["content"])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {"id": "x", "object": "chat.completion", "choices": [choice]}

    def _manage_adapters(self, path: str, body: Any) -> Answer:
        name = body["lora_name"]
        if path.startswith("/v1/unload"):
            if name not in self.models:
                return _error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
            self.models.remove(name)
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if name in self.models:
            return _error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if body["lora_path"] in self.bad:
            return _error(400, "LoRA rank 64 is greater than max_lora_rank 16.", "BadRequestError")
        self.models.append(name)
        return 200, f"Success: LoRA adapter '{name}' added successfully."


def tokens(text: str, shift: int = 0) -> list[int]:
    """Return numbers in place of tokens."""
    return [len(word) + shift for word in text.split()]


def _error(status: int, message: str, kind: str) -> Answer:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


@contextmanager
def vllm_stub(*models: str, **more: Any) -> Iterator[VllmStub]:
    """Serve on loopback for the length of the block."""
    stub = VllmStub(list(models), **more)

    class Handler(BaseHTTPRequestHandler):
        """Answer one request."""

        def do_GET(self) -> None:
            self._reply(stub.answer(self.path, None))

        def do_POST(self) -> None:
            self._reply(stub.answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def _reply(self, answer: Answer) -> None:
            data = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Write no log lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
