"""The page of a trace in a browser: it draws what is in the trace, obeys keys and mouse, and runs nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE_PAGE

from parallelism.events import Columns, Table
from parallelism.hardware import Hardware, HostLink, Link
from parallelism.trace import Event, Trace
from vcluster import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


def a_step(devices=4):
    """One forward and backward on each device, handed on, and an all_reduce; some memory."""
    events = []
    for rank in range(devices):
        events.append(Event(rank, "memory", "weights", 0, nbytes=1e6))
        if rank:
            events.append(Event(rank, "recv", "recv", 0, 2.0 * rank, peer=rank - 1, tag=0, sequence=0,
                                bytes_received=64))
        events += [
            Event(rank, "compute", f"{rank}F0", 2.0 * rank, 2, stage=rank, microbatch=0, phase="F", location="a.py:1"),
            Event(rank, "memory", "saved", 2.0 * rank, nbytes=5e5),
            Event(rank, "compute", f"{rank}B0", 2.0 * rank + 2, 3, stage=rank, microbatch=0, phase="B"),
            Event(rank, "send", "send", 2.0 * rank + 2, peer=rank + 1, tag=0, sequence=0) if rank + 1 < devices else
            Event(rank, "memory", "saved", 2.0 * rank + 5, nbytes=-5e5),
            Event(rank, "collective", "all_reduce", 2.0 * rank + 5, 2.0 * (devices - 1 - rank) + 1, axes=("pp",),
                  group=tuple(range(devices)), sequence=0, bytes_received=4096, sources=((1 - rank % 2, 4096),))]
    return Trace(events, mesh_shape={"pp": devices}, hardware="by hand")


@pytest.fixture
def opened(browser, tmp_path):
    report.html(a_step(), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    return browser


def state(browser, name):
    return browser.value(f"document.documentElement.dataset.{name}")


def window(browser):
    return float(state(browser, "from")), float(state(browser, "to"))


def test_it_loads_without_a_word_on_the_console_and_has_a_bar_for_each_event_that_takes_time(opened):
    assert opened.problems == [] and state(opened, "ready") == "yes"
    assert state(opened, "bars") == str(4 + 4 + 4 + 3)
    assert opened.text("#verdict p").startswith("4 devices for 12\xa0s: 41.7% of it compute")
    assert opened.text("#legend").count("events take no time") == 1
    shown = "[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.dataset.section).join()"
    assert opened.value(shown) == "timeline,split,collectives,matrix,memory"
    assert opened.value("document.querySelectorAll('#split tbody tr').length") == 2 + 4
    assert "peak 1.43 MiB" in opened.text("#memory-said")
    assert opened.text("#collectives tbody td") == "all_reduce"


def a_product(rank=0, flops=8e9, nbytes=1e9, seconds=4.0, **more):
    return Event(rank, "compute", "matmul", 2.0 * rank, seconds, 0, 2 * seconds, flops=flops, nbytes=nbytes, **more)


HARDWARE = Hardware("by hand", {"float32": 4e9, "float64": 2e9}, 1e9, 0.5e9, (Link("x", 2, 1, 1),), HostLink(1, 1))


def test_the_roofline_has_a_point_for_computes_that_look_alike_and_tells_them_by_key_and_pointer(browser, tmp_path):
    events = [a_product(dtype="float32"), a_product(1, dtype="float32"), a_product(1, 1e9, 2e9, 8.0, phase="F")]
    report.html(Trace(events, hardware="by hand"), tmp_path / "page.html", hardware=HARDWARE)
    browser.open(tmp_path / "page.html")
    assert browser.problems == [] and state(browser, "points") == "2"
    assert "The roof is that of by hand." in browser.text("#roof-words")
    browser.value("document.getElementById('roof').focus()")
    browser.press("n")
    assert browser.text("#roof-said") == (
        "point 1 of 2: phase F (forward); 1 time, 8.00 s in all; 0.500 flops per byte, 125 Mflop/s; "
        "50.0% of the roof there, which is that of memory")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.text("#roof-said").startswith("point 2 of 2: matmul (other compute); 2 times, 8.00 s in all; 8.00 f")
    assert browser.text("#roof-said").endswith("50.0% of the roof there, which is that of arithmetic")
    browser.value("document.getElementById('roof').scrollIntoView()")
    box = browser.value("(b => [b.x, b.y, b.width, b.height])(document.getElementById('roof').getBoundingClientRect())")
    browser.mouse("mouseMoved", box[0] + 5, box[1] + 5)
    assert browser.value("document.getElementById('roof-tip').hidden") is True
    for row in range(18, 340, 4):       # somewhere in the middle column stands the point of 8 flops a byte
        x = 78 + (box[2] - 78 - 16) * (np.log10(8) + 1) / 3
        browser.mouse("mouseMoved", box[0] + x, box[1] + row)
        if not browser.value("document.getElementById('roof-tip').hidden"):
            break
    assert browser.text("#roof-tip").startswith("matmul (other compute)\n2 times")
    assert browser.problems == []


def test_virtual_and_wall_time_stand_side_by_side_and_turns_on_the_cores_are_told(browser, tmp_path):
    report.html(Trace([a_product(cpu_seconds=2.0), a_product(1)], hardware=None), tmp_path / "page.html")
    for dark in (False, True):
        browser.open(tmp_path / "page.html", dark=dark)
        rows = "[...document.querySelectorAll('#measured tbody tr')]"
        assert browser.value(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText).join('|'))") == [
            "the whole run||6.00 s|8.00 s|0.750|2", "compute matmul||8.00 s|16.0 s|0.500|2"]
        assert "Compute had a core for 12% of its wall time: devices took turns" in browser.text("#measured-words")
        assert "messages and collectives take no virtual time" in browser.text("#measured-words")
        width = "document.querySelector('#measured tbody tr:last-child .c-%s').style.width"
        assert [browser.value(width % clock) for clock in ("virtual", "wall")] == ["50%", "100%"]
    assert browser.problems == []


def pixels(browser, x, y, width, height):
    """The colours in a rectangle of the timeline, each once."""
    return set(browser.value(f"""(() => {{
        const data = document.getElementById("bars").getContext("2d").getImageData({x}, {y}, {width}, {height}).data;
        const found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
        return [...found];
    }})()"""))


def test_bars_have_the_colours_of_what_they_are_in_light_and_in_dark(browser, tmp_path):
    report.html(a_step(), tmp_path / "page.html")
    for dark, forward, backward in ((False, "47,111,208", "184,92,16"), (True, "79,143,238", "224,136,62")):
        browser.open(tmp_path / "page.html", dark=dark)
        wide = browser.value("document.getElementById('bars').clientWidth") - 118
        assert forward in pixels(browser, 119, 28, wide // 6 - 4, 14)          # 0F0: the first 2 of 12 seconds
        row = pixels(browser, 118 + wide // 6 + 4, 28, wide // 4 - 10, 14)     # 0B0, hatched
        assert backward in row and len(row) > 2 and forward not in row


def test_keys_zoom_move_and_go_from_bar_to_bar(opened):
    opened.value("document.getElementById('bars').focus()")
    assert window(opened) == (0, 12)
    opened.press("+")
    assert window(opened) == pytest.approx((2, 10))
    opened.press("ArrowRight")
    assert window(opened) == pytest.approx((3.6, 11.6))
    opened.press("-", "-", "-")
    assert window(opened) == pytest.approx((0, 12))
    opened.press("n")
    assert opened.text("#said").startswith("0F0 (compute); rank 0, pp=0; 2.00 s from 0 s; forward, stage 0, microb")
    opened.press("n", "z")
    assert opened.text("#said").startswith("0B0") and window(opened) == pytest.approx((0, 9))
    opened.press("ArrowDown")
    assert opened.text("#said").startswith("all_reduce (collective); rank 0, pp=0; 7.00 s from 5.00 s; waits 6.00 s")
    opened.press("0", "c")
    assert window(opened) == (0, 12) and opened.value("document.getElementById('show-path').checked") is False
    assert opened.problems == []


def test_the_mouse_zooms_about_itself_moves_and_tells_what_it_is_over(opened):
    box = opened.value("(b => [b.x, b.y, b.width])(document.getElementById('bars').getBoundingClientRect())")
    gutter, wide = box[0] + 118, box[2] - 118
    opened.mouse("mouseMoved", gutter + wide / 12, box[1] + 34)
    assert opened.text("#tip").startswith("0F0 (compute)") and "a.py:1" in opened.text("#tip")
    opened.mouse("mouseWheel", gutter, box[1] + 34, deltaX=0, deltaY=-400)
    opened.frame()
    assert window(opened)[0] == 0 and window(opened)[1] < 8
    length = window(opened)[1]
    opened.mouse("mousePressed", gutter + wide / 2, box[1] + 60, button="left", clickCount=1)
    opened.mouse("mouseMoved", gutter + wide / 4, box[1] + 60, button="left")
    opened.mouse("mouseReleased", gutter + wide / 4, box[1] + 60, button="left", clickCount=1)
    opened.frame()
    assert window(opened) == pytest.approx((length / 4, length * 5 / 4), rel=0.01)       # whole pixels


def test_the_critical_path_is_drawn_and_can_be_taken_away(opened):
    red = "176,0,32"
    assert red in pixels(opened, 118, 20, 400, 10)
    opened.value("document.getElementById('show-path').click()")
    opened.frame()
    assert red not in pixels(opened, 118, 20, 400, 10)


def test_no_name_runs_or_breaks_out(browser, tmp_path):
    bad = ("</script><script>window.ran = 1</script>", "<img src=x onerror='window.ran = 1'>", "\u2028\u2029",
           "__proto__", "constructor", "\x00\x1b\udc80", "@@DATA@@", "${window.ran = 1}", "'\"`\\")
    events = [Event(i % 2, "compute", name, i, 1, 0, 1, phase=name, location=name, flops=8.0 + i, nbytes=4.0,
                    dtype=name) for i, name in enumerate(bad)]
    events += [Event(1, "collective", name, 20, 1, axes=(name,), algorithm=name, bytes_received=8,
                     sources=((0, 8),)) for name in bad]
    events += [Event(0, "memory", name, i, nbytes=9) for i, name in enumerate(bad)]
    report.html(Trace(events, mesh_shape={bad[0]: 2}, hardware=bad[1]), tmp_path / "bad.html", hardware=HARDWARE)
    browser.open(tmp_path / "bad.html")
    browser.value("document.getElementById('bars').focus()")
    browser.press("n", "n", "n", "ArrowDown")
    browser.value("document.getElementById('roof').focus()")
    browser.press("n", "n")
    assert "point 2 of 9" in browser.text("#roof-said")
    assert browser.value("window.ran") is None and browser.problems == []
    assert browser.value("document.querySelectorAll('script').length") == 2
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert bad[1][:40] in browser.text("#facts")


@pytest.mark.parametrize("trace", [Trace([]), Trace([], size=3), Trace([Event(0, "h2d", "x", bytes_received=8)])])
def test_a_trace_of_nothing_says_so(browser, tmp_path, trace):
    report.html(trace, tmp_path / "none.html")
    browser.open(tmp_path / "none.html", width=700)
    assert browser.problems == [] and ("no events" in browser.text("#verdict") or "Nothing" in browser.text("#verdict"))
    assert browser.value("[...document.querySelectorAll('section')].every(section => section.hidden)")


def long_trace(count, ranks=16):
    """So many events, of which every second is a collective of all."""
    each = count // ranks
    random = np.random.default_rng(0)
    seconds = random.exponential(1e-4, (ranks, each))
    kind = np.tile([0, 1], ranks * each // 2).astype(np.int32)
    return Trace(Columns(ranks * each, {
        "rank": np.repeat(np.arange(ranks), each), "kind": Table(("compute", "collective"), kind),
        "name": Table(tuple(f"work {i}" for i in range(99)), random.integers(0, 99, ranks * each).astype(np.int32)),
        "start_seconds": (np.cumsum(seconds, axis=1) - seconds).ravel(), "duration_seconds": seconds.ravel(),
        "phase": Table((None, "F", "B"), np.where(kind == 0, 1 + np.arange(len(kind)) % 4 // 2, 0).astype(np.int32)),
        "flops": np.where(kind == 0, random.exponential(1e6, ranks * each), 0), "nbytes": np.where(kind == 0, 1e6, 0),
        "wall_duration_seconds": seconds.ravel(),
    }), ranks)


def frames(browser, count):
    """Seconds to draw so many frames of the timeline, zooming in and out."""
    return browser.value(f"""(async () => {{
        const canvas = document.getElementById("bars"), begun = performance.now();
        for (let i = 0; i < {count}; i++) {{
            canvas.dispatchEvent(new KeyboardEvent("keydown", {{key: i % 2 ? "-" : "+"}}));
            await new Promise(requestAnimationFrame);
        }}
        return (performance.now() - begun) / 1000;
    }})()""")


@pytest.mark.slow
@pytest.mark.parametrize("count", [80_000, 1_000_000])
def test_a_long_trace_is_drawn_whole(browser, tmp_path, count):
    report.html(long_trace(count), tmp_path / "long.html")
    browser.open(tmp_path / "long.html")
    assert browser.problems == [] and state(browser, "bars") == str(count)
    drawn = int(state(browser, "drawn"))
    frames(browser, 20)
    assert int(state(browser, "drawn")) >= drawn + 19


@pytest.mark.slow
def test_screenshots_are_taken_in_both_schemes_and_widths(browser, tmp_path):
    report.html(Trace([*a_step().events, a_product(dtype="float32")], 4), tmp_path / "page.html", hardware=HARDWARE)
    for width in (1280, 390):
        for dark in (False, True):
            browser.open(tmp_path / "page.html", width=width, dark=dark)
            path = tmp_path / f"{width}-{'dark' if dark else 'light'}.png"
            browser.screenshot(path)
            assert path.read_bytes().startswith(b"\x89PNG") and browser.problems == []
            assert browser.value("document.documentElement.scrollWidth") <= width       # nothing sticks out
            found = browser.value(MEASURE_PAGE)
            assert not found["bad"] and found["seen"] > 100 and not browser.value("document.getElementById('roof').hidden")


def test_without_a_known_roof_there_is_no_roofline(browser, tmp_path):
    report.html(Trace([a_product()], hardware=None), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.value("document.querySelector('[data-section=roofline]').hidden") is True
    assert "none, as the peak of this machine is not known" in browser.text("#facts")


def test_the_browser_is_gone_when_it_is_closed(tmp_path):
    browser = Browser()
    group = browser._process.pid
    browser.close()
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            alive.append(stat)
    assert alive == []
