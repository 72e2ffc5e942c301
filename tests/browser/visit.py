"""A visit to the dashboard: opens pages in a tab, works their widgets, and keeps what the tab complains of."""

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, WebSocket
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from tests.browser import known

from deltalab_dashboard.picture import settle

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
PATIENCE_MILLISECONDS = 60_000
AXE = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
GRAVE = ("serious", "critical")
DEUTERANOPIA = {"type": "deuteranopia"}

WIDGET = ", ".join(
    f"[data-testid=stMain] [data-testid={kind}]"
    for kind in ("stSelectbox", "stMultiSelect", "stRadio", "stCheckbox", "stTextInput", "stNumberInput", "stSlider",
                 "stButtonGroup")
)  # fmt: skip

LOOK = (Path(__file__).parent / "look.js").read_text().partition("\n")[2].strip()


class Visit:
    """One tab. complaints: errors of its console, and requests to anything but the dashboard, so far."""

    def __init__(self, chromium: Browser, url: str, **context: Any) -> None:
        self.url = url
        self.context = chromium.new_context(**({"viewport": DESKTOP, "color_scheme": "light"} | context))
        self.context.set_default_timeout(PATIENCE_MILLISECONDS)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self._unanswered = False
        self.page.on("websocket", self._socket)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("request", self._request)

    def open(self, path: str = "", **query: str) -> None:
        """Opens a page by its address."""
        self.page.goto(f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else ""))
        self.settle()

    def settle(self) -> None:
        """Waits until the page is drawn, with what its script says to the last choice.

        Streamlit's page says that its script runs once the server has begun, which a busy machine does late.
        """
        until = time.monotonic() + PATIENCE_MILLISECONDS / 1000
        settle(self.page)
        while self._unanswered:
            assert time.monotonic() < until, "the server answers a choice"
            self.page.wait_for_timeout(50)
        settle(self.page)

    def pages(self) -> list[str]:
        """The addresses of the pages that the navigation offers, and that of a trial's page, which a table opens."""
        links = self.page.get_by_test_id("stSidebarNavLink").all()
        return [*(urlsplit(str(link.get_attribute("href"))).path.strip("/") for link in links), "trial"]

    def turn_to(self, path: str) -> None:
        """Turns to a page by its link in the navigation, or by its address without a link."""
        if path == "trial":
            self.page.goto(f"{self.url}/trial?{urlsplit(self.page.url).query}")
            self.settle()
            return
        link = self.page.locator(f"[data-testid=stSidebarNavLink][href$='/{path}']").first
        link.click()
        self.page.wait_for_function("path => location.pathname === '/' + path", arg=path)
        self.settle()

    def widgets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.look("widgets", WIDGET)
        return found

    def look(self, name: str, argument: Any = None) -> Any:
        """What a function of look.js says of the page."""
        return self.page.evaluate(f"argument => {LOOK}.{name}(argument)", argument)

    def text(self) -> str:
        """The words of the page."""
        return self.page.get_by_test_id("stMain").inner_text()

    def sideways(self) -> list[str]:
        """What scrolls sideways as a whole, once charts have taken the window's width."""
        for _ in range(20):
            if not any(pixels > 0 for pixels in self.look("sideways")):
                return []
            self.page.wait_for_timeout(100)
        return [
            f"{what} scrolls sideways by {pixels} pixels at {self.page.viewport_size['width']}"  # type: ignore[index]
            for what, pixels in zip(("the window", "the page"), self.look("sideways"), strict=True)
            if pixels > 0
        ]

    def boxes(self) -> list[str]:
        """What the page says went wrong."""
        found = self.page.locator("[data-testid=stException], [data-testid=stErrorElement]").all_inner_texts()
        found += self.page.locator("[role=dialog]").all_inner_texts()
        return [f"exception box: {text[:300]}" for text in found]

    def violations(self, axe: str) -> list[str]:
        """What axe-core finds that is serious or critical, and not known to be Streamlit's own."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(axe)
        found = self.page.evaluate("options => axe.run(document, options)", AXE)
        return [
            f"axe: {violation['id']} ({violation['impact']}): {violation['help']}: {node['html'][:200]} "
            f"{node['any'][0]['message'] if node['any'] else ''}"
            for violation in found["violations"]
            if violation["impact"] in GRAVE
            for node in violation["nodes"]
            if not known.streamlits_own(violation["id"], node)
        ]

    def missed_by_tab(self, most: int = 300) -> list[str]:
        """Presses Tab until the focus has gone around. Returns what a mouse can work and Tab did not reach."""
        self.look("forget")
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.look("note"):
                break
        missed: list[str] = self.look("missed")
        return missed

    def change(self, widget: int) -> None:
        """Gives the page's widget of this number another value, by the keyboard."""
        place = self.page.locator(WIDGET).nth(widget)
        kind = place.get_attribute("data-testid")
        keys = {
            "stSelectbox": ("input", ["ArrowDown", "ArrowDown", "Enter"]),
            "stMultiSelect": ("input", ["ArrowDown", "Enter", "Escape"]),
            "stRadio": ("input:checked", ["ArrowRight"]),
            "stCheckbox": ("input", ["Space"]),
            "stTextInput": ("input", ["b", "Enter"]),
            "stNumberInput": ("input", ["ArrowUp", "Enter"]),
            "stSlider": ("[role=slider], input[type=range]", ["ArrowRight"]),
            "stButtonGroup": ("button, input", ["ArrowRight", "Space"]),
        }
        focused, pressed = keys[str(kind)]
        place.locator(focused).first.focus()
        for key in pressed:
            self.page.keyboard.press(key)
            self.page.wait_for_timeout(50)
        self.settle()

    def pale(self) -> list[str]:
        """Text of charts that is paler than WCAG allows for large text and graphics."""
        found: list[str] = self.look("pale", 3)
        return found

    def photograph(self, folder: Path, name: str) -> list[Path]:
        """Keeps the screen as it is, and as a deuteranope sees it."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]+", "-", name)[:100]
        files = [folder / f"{stem}.png", folder / f"{stem}-deuteranopia.png"]
        self.page.screenshot(path=files[0])
        session = self.context.new_cdp_session(self.page)
        session.send("Emulation.setEmulatedVisionDeficiency", DEUTERANOPIA)
        self.page.screenshot(path=files[1])
        return files

    def close(self) -> None:
        self.context.close()

    def _socket(self, socket: WebSocket) -> None:
        self._unanswered = False
        socket.on("framesent", self._sent)
        socket.on("framereceived", self._received)

    def _sent(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes) and BackMsg.FromString(frame).HasField("rerun_script"):
            self._unanswered = True

    def _received(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes) and ForwardMsg.FromString(frame).HasField("new_session"):
            self._unanswered = False

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not known.probe(str(message.location.get("url", ""))):
            self.complaints.append(f"console: {message.text[:300]} {message.location.get('url', '')}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:", self.url.replace("http", "ws") + "/")):
            self.complaints.append(f"asks {request.url[:200]}")
