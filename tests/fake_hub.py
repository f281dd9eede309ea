"""A server that speaks as much of the Hugging Face hub's HTTP API as its client needs to download.

Files lie behind a redirect, are sent in ranges, and come with the headers of the real hub. A fault
is what a test lets the server do with one request: answer 429, 503 or 404, or drop the connection
in the middle of a file, or send other bytes. The files' own host has another name, as in reality.
"""

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMITS = ["c0ffee" * 6 + "beef", "decade" * 6 + "dead"]


@dataclass
class Hub:
    """Data sets by name, each with its files; the branch main stands at `commit`."""

    repos: dict[str, dict[str, bytes]]
    commit: str = COMMITS[0]
    faults: dict[str, list] = field(default_factory=dict)
    """by the end of a route: what happens to the requests for it, in turn"""
    requests: list = field(default_factory=list)
    """(method, route, range) of every request"""
    keys: set = field(default_factory=set)
    """what the requests had to say of who they are from"""
    endpoint: str = ""

    def take_fault(self, method, route):
        for end, faults in self.faults.items():
            if faults and route.endswith(end) and (method == "GET" or faults[0] != "drop"):
                return faults.pop(0)
        return None

    def counts(self):
        """Bytes-carrying requests by file name."""
        return Counter(r.rsplit("/", 1)[1] for m, r, _ in self.requests if "/cdn/" in r)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):  # noqa: N802
        route = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, route, self.headers.get("Range")))
        if "/datasets/" in route:
            self.hub.keys.add(self.headers.get("Authorization"))
        fault = self.hub.take_fault(self.command, route)
        if isinstance(fault, int):
            return self.answer(fault, b"{}", {"Retry-After": "0"} if fault == 429 else {})
        for repo, files in self.hub.repos.items():
            for answers in (self.api, self.resolve, self.cdn):
                if answers(route, repo, files, fault):
                    return None
        known = any(f"/{repo}/" in route for repo in self.hub.repos)
        code = "RevisionNotFound" if known else "RepoNotFound"
        return self.answer(404, b"{}", {"X-Error-Code": code})

    do_HEAD = do_GET  # noqa: N815

    def api(self, route, repo, files, fault):
        rest = route.partition(f"/api/datasets/{repo}/")[2]
        kind, _, rest = rest.partition("/")
        if kind == "revision" and rest in ("main", *COMMITS):
            sha = self.hub.commit if rest == "main" else rest
            return self.answer(200, json.dumps({"id": repo, "sha": sha}).encode(), {})
        if kind == "tree" and rest.split("/")[0] in COMMITS:
            folder = rest.partition("/")[2]
            items = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40,
                 "lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 130}}
                for name, data in files.items()
                if name.rpartition("/")[0] == folder
            ]  # fmt: skip
            return self.answer(200, json.dumps(items[::-1]).encode(), {}) if items else False
        return False

    def resolve(self, route, repo, files, fault):
        rest = route.partition(f"/datasets/{repo}/resolve/")[2]
        commit, _, name = rest.partition("/")
        if commit not in COMMITS or name not in files:
            return False
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha256(files[name])}"',
            "X-Linked-Size": str(len(files[name])),
            "Location": f"{self.hub.endpoint.replace('127.0.0.1', 'localhost')}/cdn/{repo}/{name}",
        }
        return self.answer(302, b"", headers)

    def cdn(self, route, repo, files, fault):
        name = route.partition(f"/cdn/{repo}/")[2]
        if name not in files:
            return False
        data, status, headers = files[name], 200, {"ETag": f'"{sha256(files[name])}"'}
        if fault == "damage":
            data = bytes(len(data))
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        return self.answer(status, data, headers, cut=fault == "drop")

    def answer(self, status, body, headers, cut=False):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
        return True

    def log_message(self, *args):
        pass


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving(hub):
    """Serve a hub at hub.endpoint until the block ends."""
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
