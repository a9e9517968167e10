"""A hub of models on this machine, which speaks as much of the Hugging Face hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as models; yields the address and, as they come, the paths that are asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = unquote(urlparse(self.path).path)
            asked.append(f"{self.command} {path}")
            for name, folder in models.items():
                files = sorted(p for p in folder.iterdir() if p.is_file())
                if path == f"/{name}/resolve/{COMMIT}/{path.rpartition('/')[2]}":
                    self.send_file(folder / path.rpartition("/")[2], with_body=with_body)
                    return
                if path.startswith(f"/api/models/{name}/tree/"):
                    self.send_json(
                        [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": digest(p)} for p in files]
                    )
                    return
                if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                    siblings = [{"rfilename": p.name, "size": p.stat().st_size} for p in files]
                    self.send_json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})
                    return
            self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        def send_json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for key, text in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **(headers or {}),
            }.items():
                self.send_header(key, text)
            self.end_headers()
            self.wfile.write(body)

        def send_file(self, path: Path, *, with_body: bool) -> None:
            body = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{digest(path)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
