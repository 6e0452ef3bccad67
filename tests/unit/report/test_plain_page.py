"""A text that a command prints, as HTML: its sentences flow with the page, and what is aligned keeps its columns."""

from __future__ import annotations

from vcluster.report.plain_page import as_shown


def test_folded_sentences_are_one_paragraph_and_a_line_that_was_ended_early_is_its_own():
    text = "\n".join(["requests of " + 13 * "words " + "so", "3000 tokens in", "compared with <ten> of 12.5 ms"])
    assert len(text.splitlines()[0]) + len(" 3000") > 80 > len("3000 tokens in compared")
    first, second = as_shown(text).removeprefix("<p>").removesuffix("</p>").split("</p><p>")
    assert first == "requests of " + 13 * "words " + "so 3000 tokens in"
    assert second == "compared with &lt;ten&gt; of 12.5\xa0ms"


def test_tables_and_lines_of_code_keep_their_columns():
    text = "a sentence\n\ntp  step\n 8  1 ms\n\nagain:\n  python -m vcluster"
    assert as_shown(text) == ("<p>a sentence</p>"
                              '<pre tabindex="0">tp  step\n 8  1 ms</pre>'
                              '<pre tabindex="0">again:\n  python -m vcluster</pre>')
