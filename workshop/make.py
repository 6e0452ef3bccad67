"""Make the notebooks, the slides and the instructor's notes from the lessons; fill a folder of wheels.

    python workshop/make.py                 writes *.ipynb, solved/*.ipynb, slides.html and INSTRUCTOR.md
    python workshop/make.py students FOLDER the folder that a student gets: the notebooks and lesson.py, no solutions
    python workshop/make.py wheels FOLDER   for rooms without a network; there:
                                            pip install --no-index --find-links FOLDER vcluster jupyterlab
    python workshop/make.py wheels FOLDER --editor      half of that, for laptops with VS Code; there:
                                            pip install --no-index --find-links FOLDER "vcluster[lessons]"

A lesson is a file ``lessons/N-name.md``.  Its text and its blocks of code become cells:

    ```python                   a cell of both notebooks
    ```python exercise          the student's notebook only: what is to be written
    ```python solution          the solved notebook only
    ```python wrong: WORDS      in no notebook: a usual wrong answer, to which the check must answer with WORDS
    ```python check             a cell that checks the exercise before it
    ```slide                    Markdown of one slide: a title and a few lines; ``![name]`` is a picture of `pictures`
    ```notes                    Markdown for the instructor
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
_FENCE = re.compile(r"^```(python(?: (?:exercise|solution|check|wrong: [^\n]*))?|slide|notes)\n(.*?)^```\n",
                    re.MULTILINE | re.DOTALL)


_IMPORT = "from lesson import Lesson"
_SOLVED = ('import os, sys; sys.path.append("..")\n'
           'os.environ.setdefault("VCLUSTER_WORKSHOP_SCORES", ".")     # your own score stays as it is')


@dataclass(frozen=True)
class Block:
    """A part of a lesson."""

    kind: str
    """``text``, ``python``, ``exercise``, ``solution``, ``check``, ``wrong``, ``slide`` or ``notes``."""
    text: str
    words: str = ""
    """Of a wrong answer: what the check must say."""


@dataclass(frozen=True)
class LessonSource:
    """A lesson, read from its file."""

    number: int
    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def exercises(self) -> tuple[str, ...]:
        """The names of the exercises, in order."""
        checks = "\n".join(block.text for block in self.blocks if block.kind == "check")
        return tuple(dict.fromkeys(re.findall(r'lesson\.check\("([^"]+)"', checks)))

    @cached_property
    def title(self) -> str:
        """The first heading."""
        return self.blocks[0].text.splitlines()[0].lstrip("# ")


def lesson(number: int) -> LessonSource:
    """The lesson of this number; ``ValueError`` if there is none."""
    paths = sorted((HERE / "lessons").glob(f"{number}-*.md"))
    if not paths:
        raise ValueError(f"there is no lesson {number}")
    text, blocks, at = paths[0].read_text(encoding="utf-8"), [], 0
    for found in _FENCE.finditer(text):
        blocks += _text(text[at:found.start()])
        kind, _, words = found[1].removeprefix("python ").partition(": ")
        blocks.append(Block(kind, found[2].rstrip("\n"), words))
        at = found.end()
    return LessonSource(number, paths[0].stem, (*blocks, *_text(text[at:])))


def _text(text: str) -> list[Block]:
    return [Block("text", text.strip("\n"))] if text.strip() else []


def lessons() -> list[LessonSource]:
    """All lessons, in order."""
    return [lesson(int(path.stem.partition("-")[0])) for path in sorted((HERE / "lessons").glob("*.md"))]


def notebook(source: LessonSource, *, solved: bool = False) -> str:
    """The text of a notebook.  A solved one lies in a folder of its own, and finds lesson.py in the one above."""
    kinds = ("text", "python", "check", "solution" if solved else "exercise")
    cells = []
    for place, block in enumerate(block for block in source.blocks if block.kind in kinds):
        written = block.text.replace(_IMPORT, f"{_SOLVED}\n{_IMPORT}") if solved else block.text
        text = written.splitlines(keepends=True)
        cell = {"cell_type": "markdown" if block.kind == "text" else "code", "id": f"cell-{source.number}-{place}",
                "metadata": {} if block.kind in ("text", "python") else {"tags": [block.kind]}, "source": text}
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    own = {} if solved else {"vcluster": {"as_given": cells}}           # what `Lesson.reset` goes back to
    whole = {"cells": cells, "metadata": {
        **own, "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def slides() -> str:
    """One page of slides: a title, and for each lesson its title and its slides.

    Arrow keys, the buttons at the foot, a click or a swipe go on and back.  The foot shows the lesson and the page.
    """
    pages: list[tuple[int, str]] = []                       # of each lesson: its first page, its name
    shown: list[tuple[str, str]] = []
    for source in lessons():
        name = f"{source.number}  {source.title}"
        pages.append((len(shown) + 2, name))
        about = " ".join(source.blocks[0].text.split("\n\n")[1].splitlines())
        shown.append((name, f"<h1>{escape(name)}</h1><p>{_inline(about)}</p>"))
        shown += [(name, _html(block.text)) for block in source.blocks if block.kind == "slide"]
    index = "".join(f'<li><a href="#{page}">{escape(name)}</a></li>' for page, name in pages)
    title = f"<h1>A cluster on a laptop</h1><p>The workshop of vcluster</p><ul>{index}</ul>"
    sections = [f'<section id="{page}" data-lesson="{escape(name)}" aria-label="{escape(name or "title")}, page {page} '
                f'of {len(shown) + 1}">{body}</section>' for page, (name, body) in enumerate([("", title), *shown], 1)]
    return _PAGE.replace("SLIDES", "\n".join(sections))


def _html(text: str) -> str:
    """Titles, lists, code and lines of Markdown."""
    parts, code = [], False
    for line in text.splitlines():
        if line.startswith("~~~"):
            parts.append("</pre>" if code else "<pre>")
            code = not code
        elif code:
            parts.append(escape(line) + "\n")
        elif found := re.fullmatch(r"!\[(\w+)\]", line):
            parts.append(f'<div class="picture">{pictures()[found[1]]}</div>')
        elif line.startswith("# "):
            parts.append(f"<h2>{_inline(line[2:])}</h2>")
        elif line.startswith("- "):
            item = f"<li>{_inline(line[2:])}</li>"
            if parts and parts[-1] == "</ul>":
                parts[-1:] = [item, "</ul>"]
            else:
                parts += ["<ul>", item, "</ul>"]
        elif line:
            parts.append(f"<p>{_inline(line)}</p>")
    return "".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", escape(text)))


@cache
def pictures() -> dict[str, str]:
    """The pictures of slides by name, as HTML."""
    from parallelism import Mesh, Pipeline, TensorSharding

    return {
        "ring": _circle("0123", "each sends to the next one"),
        "pieces": _pieces(4),
        "devices": _devices(4),
        "message": _message(),
        "held": _held({"weights": 2, "gradients": 2, "Adam's state": 12}),
        "circle": _circle("012", "each waits for the next one"),
        "gpipe": Pipeline(4, 8, "gpipe").schedule._repr_html_(),
        "one_f_one_b": Pipeline(4, 8, "1f1b").schedule._repr_html_(),
        "mesh": Mesh(dp=2, pp=2, tp=2)._repr_html_(),
        "layout": TensorSharding(None, "tp").draw((4, 6), Mesh(tp=3))._repr_html_(),
        "means": _bars({"rank 0": [4], "rank 1": [0, 0, 0]}),
    }


def _circle(names: str, words: str) -> str:
    """Ranks on a circle, with an arrow from each to the next."""
    places = [(110 + 72 * math.sin(2 * math.pi * i / len(names)), 96 - 72 * math.cos(2 * math.pi * i / len(names)))
              for i in range(len(names))]
    parts, tip = [], f"tip-{len(names)}"
    for (x, y), (u, v), name in zip(places, [*places[1:], places[0]], names, strict=True):
        far = math.hypot(u - x, v - y)
        a, b = 24 * (u - x) / far, 24 * (v - y) / far
        line = f"M{x + a:.1f} {y + b:.1f}L{u - 1.3 * a:.1f} {v - 1.3 * b:.1f}"
        parts.append(f'<path d="{line}" marker-end="url(#{tip})"/>'
                     f'<circle cx="{x:.1f}" cy="{y:.1f}" r="20"/><text x="{x:.1f}" y="{y + 6:.1f}">{name}</text>')
    return (f'<svg viewBox="0 0 220 192" role="img" aria-label="{len(names)} ranks on a circle: {escape(words)}"><defs>'
            f'<marker id="{tip}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="currentColor" stroke="none"/></marker></defs>{"".join(parts)}</svg>')


def _devices(size: int) -> str:
    """The host above its devices; each has its memory, with other numbers in it."""
    middle, parts = 60 + 70 * (size - 1), []
    for rank in range(size):
        x = 60 + 140 * rank
        parts.append(f'<path d="M{middle} 44L{x} 84" stroke-dasharray="4 4"/><path d="M{x - 52} 84h104v92h-104z"/>'
                     f'<text x="{x}" y="108">rank {rank}</text><path class="whole" d="M{x - 36} 122h72v40h-72z"/>'
                     f'<text x="{x}" y="148">x = {rank * rank}</text>')
    width = 2 * middle
    return (f'<svg viewBox="0 0 {width} 192" role="img" aria-label="a host and {size} devices, each with memory of its own">'
            f'<path d="M{middle - 60} 10h120v34h-120z"/><text x="{middle}" y="33">host</text>{"".join(parts)}</svg>')


def _message() -> str:
    """The seconds of a message over its bytes: flat at first, and then in proportion; both axes are logarithmic."""
    alpha, beta = 1e-5, 1e9
    points = [10 ** (1 + each / 8) for each in range(49)]
    times = [alpha + n / beta for n in points]
    places = [(60 + 62 * (math.log10(n) - 1), 140 - 40 * (math.log10(t) + 5)) for n, t in zip(points, times, strict=True)]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return ('<svg viewBox="0 0 480 192" role="img" aria-label="seconds of a message: the latency, then bytes by bandwidth">'
            f'<path d="M60 10V160H440"/><path class="line" d="{line}"/><text x="140" y="128">latency α</text>'
            '<text x="300" y="48">bytes / β</text><text x="370" y="184">bytes (both logarithmic)</text>'
            '<text x="30" y="30">time</text></svg>')


def _held(each: dict[str, int]) -> str:
    """The bytes of a parameter, side by side."""
    parts, x = [], 20
    for number, (name, count) in enumerate(each.items()):
        width = 32 * count
        kind = ' class="whole"' if number % 2 else ' class="bar"'
        middle, below = x + width / 2, 140 + 22 * (number % 2)
        parts.append(f'<path{kind} d="M{x} 70h{width - 4}v46h{4 - width}z"/><text x="{middle}" y="58">{count}</text>'
                     f'<text x="{middle}" y="{below}">{escape(name)}</text>')
        x += width
    words = f"{sum(each.values())} bytes a parameter"
    return (f'<svg viewBox="0 0 {x + 20} 192" role="img" aria-label="{words}">{"".join(parts)}'
            f'<text x="{(x + 20) / 2}" y="24">{words}</text></svg>')


def _pieces(size: int) -> str:
    """A square for each piece of each rank, with the number of terms in it: at first, between the halves, at the end."""
    parts = []
    grids = {"at first": lambda rank, piece: 1,
             "after the first half": lambda rank, piece: (rank - piece) % size + 1, "at the end": lambda rank, piece: size}
    for number, (words, terms) in enumerate(grids.items()):
        left = 76 + 176 * number
        for rank in range(size):
            for piece in range(size):
                count, x, y = terms(rank, piece), left + 30 * piece, 12 + 30 * rank
                kind = ' class="whole"' if count == size else ""
                parts.append(f'<path{kind} d="M{x} {y}h26v26h-26z"/><text x="{x + 13}" y="{y + 19}">{count}</text>')
        parts.append(f'<text x="{left + 58}" y="156">{words}</text>')
    parts += [f'<text x="34" y="{31 + 30 * rank}">rank {rank}</text>' for rank in range(size)]
    words = "of how many ranks a piece has the terms"
    return (f'<svg viewBox="0 0 580 192" role="img" aria-label="{words}">{"".join(parts)}'
            f'<text x="310" y="184">{words}</text></svg>')


def _bars(losses: dict[str, list[int]]) -> str:
    """The losses of the tokens of each rank as bars, and the two means."""
    parts, x = [], 20
    for name, values in losses.items():
        start = x
        for value in values:
            parts.append(f'<path class="bar" d="M{x} {130 - 25 * value}h26v{25 * value + 1}h-26z"/>'
                         f'<text x="{x + 13}" y="{122 - 25 * value}">{value}</text>')
            x += 34
        parts.append(f'<text x="{(start + x - 8) / 2}" y="152">{name}</text>')
        x += 24
    every = [value for values in losses.values() for value in values]
    mean, of_means = sum(every) / len(every), sum(sum(values) / len(values) for values in losses.values()) / len(losses)
    parts.append(f'<text x="160" y="180">mean of all {mean:g}, mean of means {of_means:g}</text>')
    words = ", ".join(f"{name} has losses {' '.join(map(str, values))}" for name, values in losses.items())
    return f'<svg viewBox="0 0 320 192" role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'


def instructor() -> str:
    """The notes for who teaches."""
    parts = [(HERE / "lessons" / "instructor.txt").read_text(encoding="utf-8").rstrip("\n")]
    for source in lessons():
        notes = "\n\n".join(block.text for block in source.blocks if block.kind == "notes")
        parts.append(f"## {source.number} {source.title}\n\n{notes}\n\nExercises: {', '.join(source.exercises)}.")
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """Every file that is made, with its text."""
    made = {HERE / "slides.html": slides(), HERE / "INSTRUCTOR.md": instructor()}
    for source in lessons():
        made[HERE / f"{source.name}.ipynb"] = notebook(source)
        made[HERE / "solved" / f"{source.name}.ipynb"] = notebook(source, solved=True)
    return made


def students(folder: str) -> None:
    """Fill a folder with what a student gets: the notebooks and lesson.py."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for source in lessons():
        (target / f"{source.name}.ipynb").write_text(notebook(source), encoding="utf-8")
    shutil.copyfile(HERE / "lesson.py", target / "lesson.py")


def wheels(folder: str, *, editor: bool = False) -> int:
    """Fill a folder with the wheels of vcluster, of all that its lessons require, and, but for an editor, of JupyterLab."""
    words = [f"{HERE.parent}[lessons]", *([] if editor else ["jupyterlab"])]
    return subprocess.run([sys.executable, "-m", "pip", "wheel", "--wheel-dir", folder, *words], check=False).returncode


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<title>A cluster on a laptop: the workshop of vcluster</title>
<meta name="viewport" content="width=device-width"><style>
:root{color-scheme:light dark}body{font:clamp(17px,2.6vw,30px)/1.45 system-ui,sans-serif;margin:0;counter-reset:page}
section{display:none;min-height:100vh;box-sizing:border-box;padding:7vh 7vw 4em;touch-action:pan-y;
overflow-wrap:anywhere}section.on{display:block}
h1,h2{line-height:1.2}ul{padding-left:1.2em}li{margin:.4em 0}a{color:inherit}
.picture{max-width:34em;margin:.6em 0;overflow-x:auto}.picture>svg{display:block;width:auto;height:34vh;fill:none;
stroke:currentColor;stroke-width:2}.picture>svg text{fill:currentColor;stroke:none;text-anchor:middle;
font:17px system-ui,sans-serif}.picture .bar{fill:#2f6fd0;stroke:none}
.picture .whole{fill:#2f6fd055}.picture .line{stroke:#2f6fd0;stroke-width:4}
pre,code{font:.85em/1.4 ui-monospace,monospace}pre{overflow-x:auto}
footer{position:fixed;left:0;right:0;bottom:0;display:flex;align-items:center;justify-content:flex-end;gap:.6em;
padding:.3em 7vw;font-size:max(14px,.55em);background:Canvas}
#lesson{margin-right:auto;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
#page{font-variant-numeric:tabular-nums;white-space:nowrap}
button{font:inherit;min-width:44px;min-height:44px;border:1px solid;border-radius:6px;background:none;color:inherit}
@media print{section{display:block;page-break-after:always}footer{display:none}
section:after{counter-increment:page;content:attr(data-lesson) "  " counter(page)}}</style>
<body>
SLIDES
<footer><span id="lesson"></span><button id="back" aria-label="back">&lsaquo;</button>
<span id="page" role="status"></span>
<button id="on" aria-label="on">&rsaquo;</button></footer>
<script>const all=[...document.querySelectorAll("section")],byId=id=>document.getElementById(id);let at=0,from=null;
function show(n){at=Math.max(0,Math.min(all.length-1,n));all.forEach((s,i)=>s.classList.toggle("on",i===at));
byId("lesson").textContent=all[at].dataset.lesson;byId("page").textContent=`${at+1} / ${all.length}`;
byId("back").disabled=at===0;byId("on").disabled=at===all.length-1;
if(location.hash!=="#"+(at+1))history.replaceState(null,"","#"+(at+1));scrollTo(0,0)}
function linked(){show((parseInt(location.hash.slice(1))||1)-1)}
addEventListener("keydown",e=>{if(e.target.tagName==="BUTTON"&&e.key===" ")return;
if(["ArrowRight","PageDown"," "].includes(e.key)){e.preventDefault();show(at+1)}
if(["ArrowLeft","PageUp"].includes(e.key)){e.preventDefault();show(at-1)}
if(e.key==="Home")show(0);if(e.key==="End")show(all.length-1)});
byId("back").onclick=()=>show(at-1);byId("on").onclick=()=>show(at+1);
addEventListener("touchstart",e=>{from=e.touches.length===1?[e.touches[0].clientX,e.touches[0].clientY]:null},
{passive:true});
addEventListener("touchend",e=>{if(!from)return;const end=e.changedTouches[0],x=end.clientX-from[0];
const y=end.clientY-from[1];from=null;if(Math.abs(x)>40&&Math.abs(x)>2*Math.abs(y))show(at+(x<0?1:-1))});
addEventListener("click",e=>{if(!e.target.closest("a,button,pre")&&!String(getSelection()))show(at+1)});
addEventListener("hashchange",linked);linked()</script></body></html>
"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["wheels"] and (len(sys.argv) == 3 or sys.argv[3:] == ["--editor"]):
        sys.exit(wheels(sys.argv[2], editor=len(sys.argv) == 4))
    if sys.argv[1:2] == ["students"] and len(sys.argv) == 3:
        sys.exit(students(sys.argv[2]))
    if len(sys.argv) > 1:
        sys.exit(__doc__.partition("\n\nA lesson is")[0])
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
