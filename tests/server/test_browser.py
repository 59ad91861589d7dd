"""The page in a real browser: a person sends a message, watches the answer and the engine, and stops it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minisgl_core.llm import AsyncLLM
from support.browser import chromium
from support.http_server import Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 60_000
HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1"> [a](javascript:window.hacked=1) [b](https://b.example/"onclick="window.hacked=1)

**<b onmouseover=alert(1)>** `</code><script>window.hacked = 1</script>` https://c.example/?q=<svg/onload=window.hacked=1>

```html
</code></pre><script>window.hacked = 1</script>
```"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Browser, served: Served) -> Iterator[Callable[..., Page]]:
    """``open_page(dark=True, width=390)``: the page, loaded. An error in its console fails the test."""
    contexts, errors = [], []

    def opened(url: str = served.url, *, dark: bool = False, width: int = 1280, height: int = 800) -> Page:
        scheme = "dark" if dark else "light"
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if is_fault(line) else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors


def is_fault(line: Any) -> bool:
    """The browser also reports each answer with a status above 400."""
    return line.type == "error" and "Failed to load resource" not in line.text


@contextmanager
def slow_steps(served: Served, seconds: float = 0.15) -> Iterator[None]:
    scheduler = served.llm.scheduler
    step = scheduler.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    scheduler.step = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        scheduler.step = step  # type: ignore[method-assign]


def until(page: Page, expression: str) -> None:
    """Wait for it. The page's policy forbids playwright's own way, which evaluates a string in the page."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def ready(page: Page) -> None:
    page.wait_for_selector("#status[data-state=ready]")


def send(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")


def answer(page: Page) -> str:
    page.wait_for_selector(".turn.assistant:not(.streaming)")
    until(page, "!document.querySelector('#stop:not([hidden])')")
    return page.inner_text(".turn.assistant:last-child .text")


def use(page: Page, **settings: str) -> None:
    page.click("#settings-toggle")
    for name, value in settings.items():
        page.fill(f"[name={name}]", value)
    page.click("#settings-toggle")


def test_a_message_is_answered_while_the_numbers_move(
    open_page: Callable[..., Page], served: Served, tmp_path: Path
) -> None:
    page = open_page()
    ready(page)
    use(page, temperature="0")
    with slow_steps(served):
        send(page, "hi there")
        until(page, "document.querySelector('.turn.assistant .text').innerText.trim().length > 0")
        first = page.inner_text(".turn.assistant .text")
        until(page, "document.getElementById('running').textContent === '1'")
        until(page, f"document.querySelector('.turn.assistant .text').innerText.length > {len(first)}")
        until(page, "Number(document.getElementById('rate-generated').textContent) > 0")
        until(page, "!document.getElementById('kv-used').textContent.startsWith('0 ')")
    whole = answer(page)
    until(page, "document.getElementById('running').textContent === '0'")
    until(page, "document.querySelectorAll('#histograms rect').length > 0")
    until(page, "document.querySelectorAll('#plan details').length > 0")
    assert len(whole) > len(first)
    assert "tokens/s" in page.inner_text(".turn.assistant .foot")
    picture = Path(os.environ.get("PAGE_SHOTS", tmp_path)) / "page.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
    assert served.rests()


def test_an_answer_is_the_engines(open_page: Callable[..., Page], served: Served) -> None:
    right = served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi there"}], max_tokens=12, temperature=0
    )
    page = open_page()
    ready(page)
    use(page, temperature="0", max_tokens="12")
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    send(page, "hi there")
    shown = answer(page)
    text = right.choices[0].message.content
    assert text is not None and "".join(shown.split()) == "".join(text.split())
    send(page, "and you?")
    until(page, "document.querySelectorAll('.turn').length === 4")
    answer(page)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"] == text and sent[1]["max_tokens"] == 12 and sent[1]["temperature"] == 0


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_an_answer_is_stopped(open_page: Callable[..., Page], served: Served, by: str) -> None:
    page = open_page(dark=True)
    ready(page)
    use(page, temperature="0")
    with slow_steps(served):
        send(page, "hi there")
        until(page, "document.querySelector('.turn.assistant .text').innerText.trim().length > 0")
        if by == "Escape":
            page.keyboard.press("Escape")
        else:
            page.click("#stop")
        answer(page)
        assert served.rests(within_s=60)
    assert "stopped" in page.inner_text(".turn.assistant .foot")
    until(page, "document.getElementById('totals').textContent.includes('abort')")


def test_the_keyboard_is_enough(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ready(page)

    def tab_to(selector: str) -> None:
        for _ in range(40):
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    assert page.evaluate("document.activeElement.id") == "message", "one can type at once"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#message") == "one\ntwo" and not page.query_selector(".turn")
    tab_to("#settings-toggle")
    page.keyboard.press("Enter")
    tab_to("[name=max_tokens]")
    page.keyboard.type("2")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    page.focus("#message")
    page.keyboard.press("Enter")
    answer(page)
    tab_to("#new")
    page.keyboard.press("Enter")
    assert not page.query_selector(".turn") and page.evaluate("document.activeElement.id") == "message"
    tab_to("nav a[href='#engine']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.body.dataset.view") == "engine"
    tab_to("#plan summary")
    page.keyboard.press("Enter")
    assert "serves" in page.inner_text("#plan details[open]")


def test_an_answer_cannot_add_markup(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ready(page)
    events = [{"choices": [{"delta": {"content": HOSTILE[at : at + 5]}}]} for at in range(0, len(HOSTILE), 5)]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    send(page, HOSTILE)
    answer(page)
    page.wait_for_selector(".turn.assistant pre")
    made = page.evaluate(
        "[...document.querySelectorAll('.turn .text *')].map(one => one.outerHTML.match(/^<[^>]*>/)[0])"
    )
    assert {tag.split()[0].strip("<>") for tag in made} <= {"p", "a", "strong", "code", "pre", "em", "br"}
    assert page.evaluate("window.hacked") is None
    links = page.evaluate(
        "[...document.querySelectorAll('.turn .text a')].map(one => [one.href, one.attributes.length])"
    )
    assert all(href.startswith("https://") and count == 3 for href, count in links)
    assert page.inner_text(".turn.user .text") == HOSTILE


def test_reasoning_is_apart_and_not_sent_back(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ready(page)
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm, "}, {"reasoning_content": "well"}, {"content": "yes"}]
    body = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas) + "data: [DONE]\n\n"
    sent: list[Any] = []

    def answered(route: Any) -> None:
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answered)
    send(page, "one")
    answer(page)
    until(page, "document.querySelector('.turn .thought:not([open])')")
    page.click(".turn .thought summary")
    assert page.inner_text(".turn .thought p") == "hm, well" and page.inner_text(".turn.assistant .text") == "yes"
    send(page, "two")
    until(page, "document.querySelectorAll('.turn').length === 4")
    answer(page)
    assert sent[1][1] == {"role": "assistant", "content": "yes"}


def test_markdown(open_page: Callable[..., Page]) -> None:
    page = open_page()
    source = "# Head\n\none *two* **three** `four`\nfive\n\n- a\n- b\n\n3. c\n4. d\n\n> e\n\n"
    source += "```py\nf = 1 * 2 * 3\n```\n2 * 3 * 4, a_b_c"
    made = page.evaluate(
        """async source => {
            const { render } = await import(new URL("page/markdown.js", location.href));
            const whole = document.createElement("div"), grown = document.createElement("div");
            render(whole, source);
            for (let at = 0; at <= source.length; at++) render(grown, source.slice(0, at));
            return [whole.innerHTML, grown.innerHTML];
        }""",
        source,
    )
    assert (
        made[0]
        == made[1]
        == (
            "<h4>Head</h4><p>one <em>two</em> <strong>three</strong> <code>four</code><br>five</p>"
            '<ul><li>a</li><li>b</li></ul><ol start="3"><li>c</li><li>d</li></ol><blockquote>e</blockquote>'
            '<pre tabindex="0"><code>f = 1 * 2 * 3</code></pre><p>2 * 3 * 4, a_b_c</p>'
        )
    )


def test_the_page_requests_the_key(open_page: Callable[..., Page], async_llm: AsyncLLM) -> None:
    with serving(async_llm, api_key="secret") as locked:
        page = open_page(locked.url)
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open] #key-note:has-text('wrong')")
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        ready(page)
        use(page, max_tokens="2")
        send(page, "hi")
        answer(page)
        assert page.evaluate(
            "[sessionStorage.length, localStorage.getItem('minisgl.settings').includes('secret')]"
        ) == [
            1,
            False,
        ]


def test_the_page_waits_for_the_model_and_notices_the_servers_end(
    open_page: Callable[..., Page], async_llm: AsyncLLM
) -> None:
    with serving(None) as loading:
        page = open_page(loading.url)
        page.wait_for_selector("#status[data-state=loading]")
        page.fill("#message", "hi")
        page.keyboard.press("Enter")
        assert page.is_disabled("#send") and page.input_value("#message") == "hi"
        loading.state.llm = async_llm
        ready(page)
        page.wait_for_selector("#send:enabled")
        with slow_steps(loading):
            page.keyboard.press("Enter")
            until(page, "document.querySelector('.turn.assistant .text')?.innerText.trim().length > 0")
            loading.stop()
        page.wait_for_selector("#status[data-state=gone]")
    page.wait_for_selector(".turn .error")
    assert page.is_visible("#notice") and page.inner_text("#running") == "–"


def test_errors_of_the_server_are_shown(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ready(page)
    send(page, "word " * 70)
    page.wait_for_selector(".turn .error:has-text('context')")
    assert page.input_value("#message").startswith("word"), "the message may be changed and sent again"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_is_cut_off(open_page: Callable[..., Page], dark: bool, width: int, tmp_path: Path) -> None:
    page = open_page(dark=dark, width=width, height=844 if width == 390 else 800)
    ready(page)
    for view in ("chat", "engine", "api"):
        page.click(f"nav a[href='#{view}']")
        page.wait_for_selector(f"body[data-view={view}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.evaluate(
            "[...document.querySelectorAll('main section')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert wide == 0, view
        page.screenshot(path=tmp_path / f"{view}.png")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 22, 20)" if dark else "rgb(247, 247, 245)")
    assert contrast(page, ".quiet") >= 4.5 and contrast(page, "nav a") >= 4.5


def contrast(page: Page, selector: str) -> float:
    """WCAG 2.2's contrast ratio of a text and the page's ground."""
    colors = page.evaluate(
        "selector => [getComputedStyle(document.querySelector(selector)).color,"
        " getComputedStyle(document.body).backgroundColor]",
        selector,
    )
    first, second = (luminance([int(part) for part in color[4:-1].split(",")]) for color in colors)
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def luminance(rgb: list[int]) -> float:
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
