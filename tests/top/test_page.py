"""The page of `sdp top --serve`: who may read it, and what a browser shows."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from sdp_plugins.top.page_server import PageServer
from sdp_plugins.top.sampling import Sampling
from sdp_plugins.top.view import HEADINGS
from tests.ranks import HANG_S, Start
from tests.top.cases import going, sampling_of, train

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def sampling(start_pooled: Start) -> Iterator[Sampling]:
    """Two readings of a job."""
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        found = sampling_of(ranks)
        found.read()
        time.sleep(1)
        found.read()
        yield found


@pytest.fixture
def page(sampling: Sampling) -> Iterator[PageServer]:
    """The page of a job."""
    with closing(PageServer(sampling, 0)) as server:
        yield server


def get(url: str, path: str | None = None, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=HANG_S)
    with closing(connection):
        connection.request("GET", parts.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()


def test_the_page_is_whole_and_has_a_strict_policy(page: PageServer) -> None:
    answer, text = get(page.url)
    assert answer.status == 200 and text.startswith("<!DOCTYPE html>")
    policy = answer.headers["Content-Security-Policy"]
    (nonce,) = set(re.findall(r"'nonce-(.+?)'", policy))
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert re.findall(r"<(?:script|style)[^>]*>", text) == [
        f'<style nonce="{nonce}">',
        f'<script nonce="{nonce}">',
    ]
    assert not re.findall(r"https?:|//[a-z]|\bimport\b|innerHTML|<link(?! rel=\"icon\")", text)
    again, _ = get(page.url)
    assert nonce not in again.headers["Content-Security-Policy"]
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_data(page: PageServer) -> None:
    answer, text = get(page.url, urlsplit(page.url).path + "data")
    found = json.loads(text)
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("application/json")
    assert found["headings"] == list(HEADINGS) and not found["ended"]
    assert "rank 1 is the straggler" in str(found["groups"])
    assert {lane["rank"] for lane in found["lanes"]} == {0, 1}


def test_requests_without_the_token_are_refused(page: PageServer) -> None:
    token = urlsplit(page.url).path.strip("/")
    assert len(token) >= 40
    wrong = "A" * len(token)
    for path in ("/", "/data", "//data", "/favicon.ico", f"/{wrong}/", f"/{wrong}/data"):
        answer, text = get(page.url, path)
        assert answer.status == 403 and token not in text
    for path in (
        f"/{token}",
        f"/{token[:-1]}/data",
        f"/x/{token}/data",
        f"/?token={token}",
        "/%FF/data",
        "*",
    ):
        assert get(page.url, path)[0].status == 403
    assert get(page.url, f"/{token}/other")[0].status == 404


def test_other_hosts_names_are_refused(page: PageServer) -> None:
    port = urlsplit(page.url).port
    assert get(page.url, Host=f"localhost:{port}")[0].status == 200
    for host in (f"attacker.example:{port}", "127.0.0.1", "", f"127.0.0.1:{port}.attacker.example"):
        assert get(page.url, Host=host)[0].status == 403
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as raw:  # none at all
        raw.sendall(f"GET {urlsplit(page.url).path} HTTP/1.0\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 403 ")


def test_other_methods_and_addresses_are_refused(page: PageServer) -> None:
    parts = urlsplit(page.url)
    assert parts.hostname == "127.0.0.1"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        with closing(http.client.HTTPConnection(parts.netloc, timeout=HANG_S)) as connection:
            connection.request(method, parts.path)
            assert connection.getresponse().status == 501


def test_no_request_is_written_to_the_terminal(
    page: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    get(page.url)
    get(page.url, "/")
    assert capfd.readouterr() == ("", "")


# ---- a browser ----------------------------------------------------------------------------------


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    if BROWSER is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("size", [(1200, 700), (390, 844)])
def test_a_browser_shows_it(page: PageServer, browser: Any, size: tuple[int, int]) -> None:
    width, height = size
    opened = browser.new_page(viewport={"width": width, "height": height})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text))
    requests: list[str] = []
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(page.url)
    opened.wait_for_selector("tr.straggler", timeout=1000 * HANG_S)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.locator("canvas").count() == 2
    assert errors == []
    assert all(url.startswith((page.url, "data:")) for url in requests)
    is_drawn = """() => [...document.querySelectorAll("canvas")].every((canvas) =>
      canvas.getContext("2d").getImageData(canvas.width - 1, 1, 1, 1).data[3] === 255)"""
    assert opened.evaluate(is_drawn)


def test_names_are_no_markup(sampling: Sampling, browser: Any) -> None:
    view = sampling.view()
    group = view.groups[0]
    row = group.rows[0]._replace(cells=(MARKUP,) * len(HEADINGS))
    told = view._replace(
        title=MARKUP, idle=MARKUP, groups=[group._replace(title=MARKUP, rows=[row])]
    )
    with (
        mock.patch.object(Sampling, "view", return_value=told),
        closing(PageServer(sampling, 0)) as server,
    ):
        opened = browser.new_page()
        opened.goto(server.url)
        opened.wait_for_selector("td", timeout=1000 * HANG_S)
        assert opened.locator("h1").text_content() == MARKUP
        assert opened.locator("h2").first.text_content() == MARKUP
        assert opened.locator("td").first.text_content() == MARKUP
        assert opened.locator("img").count() == 0
