"""Attacks over a socket, byte for byte: on paths, on the Host header, by method, from other sites, by markup.

Beside the runs lies a secret that no answer may ever contain, and inside them links that lead to it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import quote

import pytest

from quire.board.guard import POLICY
from quire.board.worker import Worker
from tests.board.making import finished, make_run, serving

SECRET = "the-secret-nobody-may-read"
EVIL = "<img src=x onerror=alert(1)>"
HOST = "127.0.0.1:8765"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


Ask = Callable[..., Answer]


def read_answer(connection: socket.socket) -> Answer:
    content = b""
    while piece := connection.recv(1 << 16):
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answer(int(first.split()[1]), headers, body.decode("utf-8", errors="replace"))


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory, formulas: Worker) -> Iterator[Ask]:
    top = tmp_path_factory.mktemp("attacked")
    root = top / "runs"
    make_run(root, "alpha", result=finished())
    (root / "alpha" / "report.html").write_text("<script>alert(1)</script>report")
    (root / "alpha" / "figures").mkdir()
    (root / "alpha" / "figures" / "plot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    for place in (top, root, root / "alpha", root / "alpha" / "figures"):
        (place / "secret.txt").write_text(SECRET)
    make_run(root, "linked")
    for name in ("report.html", "result.json", "samples.json"):
        (root / "linked" / name).symlink_to(top / "secret.txt")
    (top / "outside").mkdir()
    (top / "outside" / "plot.svg").write_text(SECRET)
    (root / "linked" / "figures").symlink_to(top / "outside")
    (root / "alpha" / "figures" / "link.svg").symlink_to(top / "secret.txt")
    (root / "away").symlink_to(top)

    with serving(root, formulas) as port:

        def send(target: str, *headers: str, method: str = "GET", version: str = "1.1") -> Answer:
            """The request as it is written here; without headers it comes from this machine."""
            lines = [
                f"{method} {target} HTTP/{version}",
                *(headers or [f"Host: {HOST}"]),
                "Connection: close",
            ]
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall("\r\n".join([*lines, "", ""]).encode())
                return read_answer(connection)

        yield send


PATHS = [
    "/../secret.txt", "/runs/../secret.txt", "/runs/alpha/../../secret.txt", "/static/../../../secret.txt",
    "/runs/%2e%2e/secret.txt", "/runs/..%2fsecret.txt", "/runs/alpha/..%2f..%2fsecret.txt",
    "/runs/%2e%2e%2fsecret.txt", "/runs/alpha/%2e%2e/%2e%2e/secret.txt", "/runs/..%252fsecret.txt",
    "/runs/alpha/secret.txt", "/runs/alpha/figures/..%2fsecret.txt", "/runs/alpha/figures/../secret.txt",
    "/runs/alpha/figures/%2e%2e%2f%2e%2e%2f%2e%2e%2fsecret.txt", "/runs/alpha/figures/link.svg",
    "/runs/linked/report", "/runs/linked/figures/plot.svg", "/runs/away/report", "/runs/away",
    "/runs/alpha/config.toml", "/runs/alpha/report/../../../secret.txt", "/runs/..\\secret.txt",
    "/runs/alpha%00/report", "/runs/alpha%0d%0aset-cookie:x=1", "/runs//etc/passwd", "//etc/passwd",
    "/static/%2e%2e%2fapp.py", "/static/..%2fapp.py", "/static/..", "/static/app.py", "/runs/.", "/runs/..",
    "/runs/%c0%ae%c0%ae%c0%afsecret.txt", "/sheet/..%2f..%2fsecret.txt", "/instruments/..%2f..%2fsecret.txt",
    "/file:///etc/passwd", "/api/diagnosis?run=../secret.txt", "/api/diagnosis?run=/etc",
    "/api/moving?run=..",
    "/api/curves?run=../away&measure=loss", "/compare?run=../secret.txt&run=/etc/passwd",
    "/compare?run=away&run=alpha", "/runs/" + "a" * 9000, "/?words=" + "a" * 9000,
    "/runs/alpha/report%00.txt",
    "http://evil.example/runs/../secret.txt", "*", "/%", "/runs/%ff%fe", "/runs/alpha/figures/",
    "/runs/alpha/figures/secret.txt",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out(ask: Ask, path: str) -> None:
    answer = ask(path)
    assert SECRET not in answer.text
    assert "root:" not in answer.text
    assert "import " not in answer.text  # no source either
    assert answer.status in (400, 404, 414)
    assert "set-cookie" not in answer.headers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["../secret.txt", "..", "/etc", "away", "linked", "%2e%2e/top", "alpha%00", ""]
)
def test_no_run_to_explain_leads_out(ask: Ask, name: str) -> None:
    text = ask(f"/explain?model=runs/{name}").text
    assert SECRET not in text
    assert 'class="notice bad"' in text
    assert "By layer" not in text


def test_links_inside_a_run_are_not_followed(ask: Ask) -> None:
    answer = ask("/runs/linked")
    assert answer.status == 200
    assert SECRET not in answer.text


HOSTS = [
    "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example:8765",
    "0.0.0.0:8765",
    "127.0.0.1:8765@evil.example", "evil.example#127.0.0.1", "localhost:8765/evil", "127.0.0.2", "[::]:8765",
    "192.168.0.7:8765", "LOCALHOST.", "127.0.0.1:99999999", "①27.0.0.1", "", "127.1", "2130706433",
    "localhost,evil",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_not_answered(ask: Ask, host: str) -> None:
    answer = ask("/", f"Host: {host}")
    assert answer.status in (400, 421)
    assert "alpha" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        ("Host: 127.0.0.1:8765", "Host: evil.example"),
        ("X-Forwarded-Host: 127.0.0.1",),
        ("Host: evil.example", "X-Forwarded-Host: 127.0.0.1", "Forwarded: host=127.0.0.1"),
    ],
)
def test_no_header_stands_for_the_host(ask: Ask, headers: tuple[str, ...]) -> None:
    assert ask("/", *headers).status in (400, 421)
    assert ask("/", *headers, version="1.0").status in (400, 421)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LocalHost", "[::1]:8765"])
def test_this_machine_is_answered(ask: Ask, host: str) -> None:
    assert "alpha" in ask("/", f"Host: {host}").text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUERY", "get"])
@pytest.mark.parametrize("path", ["/runs/alpha", "/api/proof?id=loss/hinge", "/nothing"])
def test_the_board_only_reads(ask: Ask, method: str, path: str) -> None:
    answer = ask(path, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.headers["content-security-policy"] == POLICY


def test_head_is_a_get_without_a_body(ask: Ask) -> None:
    answer = ask("/runs/alpha", method="HEAD")
    assert (answer.status, answer.text) == (200, "")


@pytest.mark.parametrize(
    ("site", "mode", "dest"),
    [
        ("cross-site", "cors", "empty"), ("cross-site", "no-cors", "image"),
        ("cross-site", "no-cors", "script"),
        ("same-site", "cors", "empty"), ("cross-site", "websocket", "websocket"),
    ],
)  # fmt: skip
def test_another_site_may_not_ask(ask: Ask, site: str, mode: str, dest: str) -> None:
    fetch = (f"Sec-Fetch-Site: {site}", f"Sec-Fetch-Mode: {mode}", f"Sec-Fetch-Dest: {dest}")
    assert ask("/api/runs", f"Host: {HOST}", *fetch).status == 403
    linked = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert ask("/", f"Host: {HOST}", *linked).status == 200


INJECTIONS = [
    f"/?words={quote(EVIL)}", f"/?sort={quote(EVIL)}&order={quote(EVIL)}", f"/runs/{quote(EVIL)}",
    f"/compare?run={quote(EVIL)}&run=alpha", f"/instruments/{quote(EVIL)}", f"/{quote(EVIL)}",
    "/?words=" + quote('"><script>alert(1)</script>'), "/?words=" + quote("' onfocus='alert(1)"),
    f"/static/{quote(EVIL)}", f"/runs/alpha/{quote(EVIL)}",
    f"/compare?run=alpha&run=linked&{quote(EVIL)}={quote(EVIL)}",
]  # fmt: skip
SLOW_INJECTIONS = [
    f"/explain?model={quote(EVIL)}&input={quote(EVIL)}&batch={quote(EVIL)}", f"/sheet/{quote(EVIL)}",
    f"/explain?model=resnet18&input={quote(EVIL)}", f"/explain?model=runs/{quote(EVIL)}",
    f"/sheet/{quote(EVIL)}/{quote(EVIL)}/picture.svg",
]  # fmt: skip


@pytest.mark.parametrize(
    "path", [*INJECTIONS, *(pytest.param(path, marks=pytest.mark.slow) for path in SLOW_INJECTIONS)]
)
def test_what_is_asked_comes_back_as_text(ask: Ask, path: str) -> None:
    answer = ask(path)
    assert answer.status in (200, 404)
    assert "<img src=x" not in answer.text
    assert "<script>" not in answer.text
    assert "' onfocus='" not in answer.text
    assert answer.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize(
    "path",
    ["/", "/runs/alpha", "/nothing", "/runs/alpha/report", "/runs/alpha/figures/plot.svg", "/api/runs",
     "/api/moving?run=none", "/static/board.css", "/compare?run=alpha&run=linked", "/compare"],
)  # fmt: skip
def test_every_answer_carries_its_policy(ask: Ask, path: str) -> None:
    headers = ask(path).headers
    policy = headers["content-security-policy"]
    document = path.endswith(("/report", ".svg"))
    assert policy == POLICY or document
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert ("unsafe-inline" in policy) == document
    assert policy.startswith("sandbox;") == document  # what lies in a run may not run anything
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_no_socket_is_opened(ask: Ask) -> None:
    upgrade = (
        "Upgrade: websocket",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
    )
    assert ask("/api/runs", f"Host: {HOST}", *upgrade).status != 101
