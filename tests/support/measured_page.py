"""What is wrong with pictures in a page: text that overflows, is cut or covered, or that is hard to read."""

JUPYTERLAB = """
.jp-RenderedHTMLCommon{color:#212121;font-size:14px;line-height:1.5;padding-right:20px}
.jp-RenderedHTMLCommon table{border-collapse:collapse;border:none;font-size:12px;table-layout:fixed;margin:0 auto 1em}
.jp-RenderedHTMLCommon thead{border-bottom:1px solid #bdbdbd;vertical-align:bottom}
.jp-RenderedHTMLCommon td,.jp-RenderedHTMLCommon th,.jp-RenderedHTMLCommon tr{vertical-align:middle;padding:.5em;
 line-height:normal;white-space:normal;max-width:none;border:none}
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td,:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon th,
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon tr{text-align:right}
.jp-RenderedHTMLCommon tbody tr:nth-child(even){background:#f5f5f5}
.jp-RenderedHTMLCommon pre{white-space:pre-wrap;margin:8px}
"""
"""What JupyterLab 4 says of the HTML in a cell's output (its package rendermime, style/base.css)."""

MEASURE = r"""
(() => {
  const bad = [], page = document.documentElement, wide = page.clientWidth;
  if (page.scrollWidth > wide) bad.push(`the page is ${page.scrollWidth} wide of ${wide}`);
  const number = words => words.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
  const colour = text => {
    if (!/^(rgb|color)/.test(text)) return null;
    const parts = number(text.replace(/^color\(srgb /, '')), scale = text.startsWith('color') ? 255 : 1;
    return [parts[0] * scale, parts[1] * scale, parts[2] * scale, parts.length > 3 ? parts[3] : 1];
  };
  const over = (top, ground) => [0, 1, 2].map(i => top[i] * top[3] + ground[i] * (1 - top[3])).concat(1);
  const light = c => [0, 1, 2].map(i => c[i] / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + .05) / (y + .05);
  };
  const ground = element => {
    const found = [];
    for (let e = element; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c && c[3]) { found.push(c); if (c[3] === 1) break; }
    }
    return found.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const rects = new Map();
  const bars = svg => {
    if (!rects.has(svg)) rects.set(svg, [...svg.querySelectorAll('rect')].map(e => {
      const s = getComputedStyle(e), c = colour(s.fill);
      if (c) c[3] *= Number(s.fillOpacity);
      return {e, c, box: e.getBoundingClientRect(), inGroup: e.parentElement.tagName === 'g'};
    }));
    return rects.get(svg);
  };
  const texts = new Map(), quantity = /^[-+≥≤~]?\s?\d[\d.,]*(\s?[a-zA-Z%][a-zA-Z/]{0,7})?$|^-?$|^[\d ]+$/;
  const scaled = element => {
    const matrix = element.getScreenCTM && element.getScreenCTM();
    return parseFloat(getComputedStyle(element).fontSize) * (matrix ? Math.hypot(matrix.a, matrix.b) : 1);
  };
  let seen = 0, least = 99;
  for (const root of document.querySelectorAll('.vcluster')) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node; node = walker.nextNode();) {
      const words = node.data.trim(), parent = node.parentElement;
      if (!words || parent.closest('style,title,defs,script,option')) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect();
      if (!box.width || !box.height) continue;
      seen++;
      const around = parent.closest('svg,foreignObject'), svg = around && around.tagName === 'svg' ? around : null;
      const name = JSON.stringify(words.slice(0, 40));
      if (scaled(parent) < 9) bad.push(`${name} has ${scaled(parent).toFixed(1)} px`);
      const cell = parent.closest('td');
      if (cell && /right|end/.test(getComputedStyle(cell).textAlign) && !quantity.test(cell.innerText.trim()))
        bad.push(`${name} is text, and flush right`);
      for (const found of node.data.matchAll(/\d[\s\u00a0](?:[num]?s|[kMGTP]?B(?:\/s)?|[KMGT]iB|%|bytes)(?![\w\/])/g)) {
        range.setStart(node, found.index);
        range.setEnd(node, found.index + found[0].length);
        const lines = [...range.getClientRects()].map(e => e.bottom);
        if (Math.max(...lines) - Math.min(...lines) > 5) bad.push(`"${found[0]}" is broken from its unit in ${name}`);
      }
      let scrolls = null;
      for (let e = parent; e; e = e.parentElement) {
        const style = getComputedStyle(e), its = e.getBoundingClientRect();
        if (/auto|scroll/.test(style.overflowX)) { scrolls = e; break; }
        const past = box.left < its.left - 1.5 || box.right > its.right + 1.5;
        if (e !== page && /hidden|clip/.test(style.overflowX) && past)
          bad.push(`${name} is cut`);
      }
      if (!scrolls && (box.left < -1 || box.right > wide + 1)) bad.push(`${name} overflows the page`);
      let below = ground(svg ? svg.parentElement : parent);
      if (svg) {
        const edge = svg.getBoundingClientRect();
        if (box.left < edge.left - 1.5 || box.right > edge.right + 1.5
            || box.bottom > edge.bottom + 2 || box.top < edge.top - 2)
          bad.push(`${name} is cut by its picture`);
        const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
        for (const {e, c, box: b, inGroup} of bars(svg)) {
          if (inGroup && e.parentElement.contains(parent) && y > b.top && y < b.bottom
              && (box.left < b.left - 1 || box.right > b.right + 1))
            bad.push(`${name} is wider than its bar`);
          if (x < b.left || x > b.right || y < b.top || y > b.bottom) continue;
          if (c && e.compareDocumentPosition(parent) & Node.DOCUMENT_POSITION_FOLLOWING) below = over(c, below);
        }
        if (!texts.has(svg)) texts.set(svg, []);
        texts.get(svg).push([box, name]);
      }
      const ink = colour(svg ? getComputedStyle(parent).fill : getComputedStyle(parent).color);
      const ratio = contrast(over(ink, below), below);
      least = Math.min(least, ratio);
      if (ratio < 4.5) bad.push(`${name} has a contrast of ${ratio.toFixed(2)}`);
    }
  }
  for (const all of texts.values()) {
    all.sort((a, b) => a[0].left - b[0].left);
    for (let i = 0; i < all.length; i++)
      for (let k = i + 1; k < all.length && all[k][0].left < all[i][0].right - 1; k++)
        if (Math.min(all[i][0].bottom, all[k][0].bottom) - Math.max(all[i][0].top, all[k][0].top) > 4)
          bad.push(`${all[i][1]} and ${all[k][1]} lie on each other`);
  }
  return {bad: bad.slice(0, 40), count: bad.length, seen, least};
})()
"""

MEASURE_PAGE = MEASURE.replace("'.vcluster'", "'body'")
"""The same of all that is on a page."""

UNFOLD = """
document.querySelectorAll('details').forEach(e => e.open = true);
document.querySelectorAll('[data-step]').forEach(e => e.hidden = false);
"""

SCROLLS = """
[...document.querySelectorAll('body *')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
 /auto|scroll/.test(getComputedStyle(e).overflowX)).map(e => e.tagName)
"""
"""The tags of what is wider than its place on the page, and is to be scrolled."""

SHOWN_CIRCLES = "[...document.querySelectorAll('circle')].filter(c => c.getBoundingClientRect().width)"
"""The points that a reader sees, of pictures that are drawn for broad and for narrow screens."""
