"""`launch_words`: the words of flags in the text of a launch script, which is read and never run.

A line is read as a shell reads it: quotes, backslashes, comments, arrays, plain assignments, ``$NAME``, ``${NAME:-8}``
and ``$((8 * NODES))``.  Whatever would have to run is refused, with its line: ``$(...)``, pipes, loops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple, NoReturn

from parallelism.display.quantities import short_errors, shortened
from parallelism.training.shell_arithmetic import arithmetic

MOST_CHARACTERS = 4_000_000
"""More are not made of a script by replacing names: a name that has another twice, which has another twice, ..."""
DEEPEST = 20
"""The most ``${NAME:-...}`` that lie in each other."""

FIELD_OF_SPACE = re.compile(r"[ \t\n]+")
UNSET = re.compile("\0([^\0]*)\0")
"""A name that has no value, where it stood in a word.  No text has zero bytes."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(\(?)", re.ASCII)
_PLAIN = re.compile(r"[^ \t\n;'\"\\$`|&<>()#]+|#")
_PLAIN_IN_BRACES = re.compile(r"[^ \t\n;'\"\\$`|&<>()}]+")
_IN_QUOTES = re.compile(r'[^"$`\\]+')
_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_DECLARES = ("export", "declare", "readonly", "local", "typeset")
_PASSED_OVER = (
    "cd",
    "echo",
    "exit",
    "mkdir",
    "set",
    "shopt",
    "sleep",
    "true",
    "ulimit",
    "umask",
    "wait",
    ":",
)
"""Commands that neither have flags nor give a name a value."""
_RESERVED = (
    *("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac"),
    *("function", "select", "time", "coproc", "[", "[[", "{", "}", "!"),
)
_PROGRAM_IN_TEXT = re.compile(r"\.py[ \t\n]")
_LAUNCHER = re.compile(
    r"--(?:nproc|nnodes|node[-_]rank|master|rdzv|max[-_]restarts|local[-_]addr|standalone|tee|log[-_]dir)(?:[-_=]|$)"
)
"""Flags of torchrun."""
_BARE = re.compile(r"--(?:pipeline-model-parallel-layout|[a-z-]*-freq|hybrid-[a-z-]*pattern)(=|$)", re.ASCII)
"""Flags whose values have parentheses and bars: they are read up to a blank even where no quotes stand."""


class LaunchWord(NamedTuple):
    """A word, and the line on which it begins.  A name without a value is still in it: see `UNSET`."""

    text: str
    line: int


class LaunchWords(NamedTuple):
    """The words of flags in a launch script, and the names of variables that it reads."""

    words: list[LaunchWord]
    names: frozenset[str]


@short_errors
def launch_words(text: str, given: Mapping[str, str]) -> LaunchWords:
    """The flags of a script: of its commands behind the name of a program (``pretrain_gpt.py``), and lines of flags.

    If it has neither, those of the arrays and texts that it assigns.  ``given`` names have their value whatever the
    script assigns.  ``ValueError``, with the line, for what only a shell can do.

    >>> [word.text for word in launch_words('TP=2\\nA=(--bf16)\\nrun.py "${A[@]}" --seed ${S:-$TP} # all', {}).words]
    ['--bf16', '--seed', '2']
    """
    reader = _Reader(text.replace("\r\n", "\n").removeprefix("\ufeff"), given)
    words = reader.script()
    return LaunchWords(words, frozenset(reader.read))


class _Reader:
    """Reads a script from its beginning to its end; variables have their values as soon as they are assigned."""

    def __init__(self, text: str, given: Mapping[str, str]) -> None:
        self.text, self.at, self.depth, self.made = text, 0, 0, 0
        self._counted, self._line = 0, 1
        self.given = {**given}
        self.variables: dict[str, list[LaunchWord]] = {}
        """A text is an array of one word."""
        self.read: set[str] = set()
        self.fields = _Fields()
        self.assigned: str | None = None
        """The name whose value is read."""

    @property
    def line(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = max(self._counted, self.at)
        return self._line

    def refuse(self, what: str, line: int | None = None) -> NoReturn:
        raise ValueError(f"line {self.line if line is None else line}: {what}")

    # -- statements ----------------------------------------------------------------------------------------------------

    def script(self) -> list[LaunchWord]:
        flags: list[LaunchWord] = []
        has_flags = False
        while self.at < len(self.text):
            words = self._statement()
            if words and (found := self._flags_of(words)) is not None:
                flags += found
                has_flags = True
        if has_flags:
            return flags
        values = chain.from_iterable(map(self._assigned_flags, self.variables.values()))
        return [word for word in values if word]

    def _statement(self) -> list[LaunchWord]:
        """The words up to the end of a line, or a ``;``; what it assigns is assigned."""
        words: list[LaunchWord] = []
        while self.at < len(self.text):
            self._skip_blanks()
            if self.text.startswith(("\n", ";"), self.at):
                self.at += 1
                break
            may_assign = not words or words[0].text in _DECLARES
            assigned = _ASSIGNED.match(self.text, self.at) if may_assign else None
            if assigned is not None:
                self._assign(*assigned.groups())
            elif self.at < len(self.text):
                words += self._word(words[-1].text if words else "")
        return words

    def _skip_blanks(self) -> None:
        """Past blanks, comments and the ends of lines behind a backslash."""
        blank = _BLANK.match(self.text, self.at)
        assert blank is not None  # it may be empty
        self.at = blank.end()

    def _assign(self, name: str, more: str, parenthesis: str) -> None:
        self.at += len(name) + len(more) + 1
        line = self.line
        if parenthesis:
            self.at += 1
            value = self._array(line)
        else:
            self.assigned = name
            value = [LaunchWord(" ".join(word.text for word in self._word("", splits=False)), line)]
            self.assigned = None
        if name in self.given:
            return
        before = self.variables.get(name, []) if more else []
        if before and not parenthesis:
            *others, last = before
            value = [*others, LaunchWord(last.text + value[0].text, last.line)]
            before = []
        self.variables[name] = [*before, *value]

    def _array(self, line: int) -> list[LaunchWord]:
        words: list[LaunchWord] = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                self.refuse("a parenthesis ( is not closed", line)
            if self.text[self.at] == ")":
                self.at += 1
                return words
            if self.text[self.at] == ";":
                self.refuse("a parenthesis ( is not closed", line)
            if self.text[self.at] == "\n":
                self.at += 1
            else:
                words += self._word(words[-1].text if words else "")

    def _flags_of(self, words: list[LaunchWord]) -> list[LaunchWord] | None:
        """The flags of a command; None if it has none."""
        first = words[0].text
        if (quoted := next((word for word in words if _PROGRAM_IN_TEXT.search(word.text)), None)) is not None:
            # as in: srun sh -c "python pretrain_gpt.py --bf16"
            words = [LaunchWord(each, quoted.line) for each in quoted.text.split()]
        program = next((place for place, word in enumerate(words) if word.text.endswith(".py")), None)
        if first in _RESERVED:
            self.refuse(f"{first} is a command of the shell, and nothing is run here", words[0].line)
        if program is not None:
            return words[program + 1 :]
        if first.startswith("--") or UNSET.match(first):
            return words
        if first not in _DECLARES and first not in _PASSED_OVER:
            self.refuse(
                f"{shortened(first, 40)} is a command, and nothing is run here; flags stand on lines of their own or "
                "behind the name of a program, such as pretrain_gpt.py",
                words[0].line,
            )
        return None

    @staticmethod
    def _assigned_flags(value: list[LaunchWord]) -> list[LaunchWord]:
        """The flags in an array or a text that was assigned; those of torchrun are none."""
        if len(value) == 1:
            value = [LaunchWord(word, value[0].line) for word in value[0].text.split()]
        if not value or not value[0].text.startswith("--") or _LAUNCHER.match(value[0].text):
            return []
        return value

    # -- words ---------------------------------------------------------------------------------------------------------

    def _word(self, before: str, *, splits: bool = True) -> list[LaunchWord]:
        """The words that the next one is: a name without quotes may be several, or none."""
        line, self.fields = self.line, _Fields()
        bare = bool((option := _BARE.match(before)) and not option[1])
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;" and not (bare and character == ";"):
                break
            if character == ")" and not bare:
                if splits:
                    break
                self.refuse("a parenthesis ) has no beginning")
            bare = bare or (len(self.fields.pieces) == 1 and bool(_BARE.match(self.fields.last)))
            self._part(character, is_bare=bare, splits=splits)
        words = [LaunchWord(text, line) for text in self.fields.closed()]
        self.made += sum(len(word.text) for word in words)
        if self.made > MOST_CHARACTERS:
            self.refuse(f"with its names replaced the text has more than {MOST_CHARACTERS:,} characters")
        if not words and self.at < len(self.text) and self.text[self.at] == ")":
            self.refuse("a parenthesis ) has no beginning")
        return words

    def _part(self, character: str, *, is_bare: bool, splits: bool) -> None:
        """Reads a part of a word: a quoted one, a name, or letters."""
        if character == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            self.fields.add("" if following == "\n" else following, is_quoted=following != "\n")
        elif character == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                self.refuse("a quote ' is not closed")
            self.fields.add(self.text[self.at + 1 : end], is_quoted=True)
            self.at = end + 1
        elif character == '"':
            self._quoted()
        elif character == "$":
            self._expanded(is_quoted=not splits)
        elif character == "`":
            self._command("`")
        elif (plain := _PLAIN.match(self.text, self.at)) is not None:
            self.fields.add(plain[0])
            self.at = plain.end()
        elif is_bare:
            self.fields.add(character)
            self.at += 1
        else:
            self._refuse_operator(character)

    def _refuse_operator(self, character: str) -> NoReturn:
        what = {
            "|": "a pipe | joins commands",
            "&": "& is for commands",
            "<": "< reads a file",
            ">": "> writes a file",
            "(": "a parenthesis ( without quotes is a command of the shell",
        }
        self.refuse(f"{what[character]}, and nothing is run here")

    def _quoted(self) -> None:
        """Reads what stands between double quotes."""
        line = self.line
        self.at += 1
        self.fields.is_quoted = True
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return
            if character == "$":
                self._expanded(is_quoted=True)
            elif character == "`":
                self._command("`")
            elif character == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                self.fields.add(_unescaped(following))
            else:
                end = _IN_QUOTES.match(self.text, self.at)
                assert end is not None
                self.fields.add(end[0])
                self.at = end.end()
        self.refuse('a quote " is not closed', line)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _expanded(self, *, is_quoted: bool) -> None:
        """Reads ``$NAME`` or ``${NAME...}`` and adds its value."""
        self.at += 1
        following = self.text[self.at : self.at + 1]
        if self.text.startswith("((", self.at):
            self._sum()
        elif following == "(":
            self._command("(")
        elif following == "{":
            self._braced(is_quoted=is_quoted)
        elif following and following in "@*":
            self.at += 1  # the words behind a script, of which there are none
            self._add([], is_quoted=is_quoted)
        elif (name := _NAME.match(self.text, self.at)) is not None:
            digits = name[0][:1] if name[0][0].isdecimal() else name[0]
            self.at += len(digits)
            self._add(self._value(digits)[:1], is_quoted=is_quoted)
        elif following and following in "'\"#?$!-":
            self.refuse(f"${following} is not read here")
        else:
            self.fields.add("$")

    def _command(self, begin: str) -> None:
        """Passes over a command whose result nobody reads, because the name that gets it was given a value."""
        what = "`...`" if begin == "`" else "$(...)"
        if self.assigned is None:
            self.refuse(f"{what} is a command, and nothing is run here")
        if self.assigned not in self.given:
            name = self.assigned
            self.refuse(f"{what} is a command, and nothing is run here; --set {name}=... says what {name} is")
        end = _end_of_command(self.text, self.at + 1, begin)
        if end < 0:
            self.refuse(f"{what} is not closed")
        self.at = end

    def _sum(self) -> None:
        """Reads ``$((...))`` and adds the number; where a name in it has no value, that name."""
        line = self.line
        self.at += 2
        outer, self.fields, depth = self.fields, _Fields(), 0
        while not (depth == 0 and self.text.startswith("))", self.at)):
            if self.at >= len(self.text) or self.text[self.at] == "\n":
                self.refuse("$((...)) is not closed on its line", line)
            character = self.text[self.at]
            name = _VARIABLE.match(self.text, self.at)
            if character == "$":
                self._expanded(is_quoted=True)
            elif name is not None:
                self.at = name.end()
                self._add(self._value(name[0])[:1], is_quoted=True)
            else:
                depth += (character == "(") - (character == ")")
                self.fields.add(character)
                self.at += 1
        self.at += 2
        text, self.fields = self.fields.last, outer
        if unset := UNSET.search(text):
            self.fields.add(unset[0])
            return
        try:
            self.fields.add(str(arithmetic(text)))
        except ValueError as error:
            self.refuse(f"$((...)) with {shortened(text, 40)} is not read here: {error}", line)

    def _braced(self, *, is_quoted: bool) -> None:
        line = self.line
        self.at += 1
        name = _NAME.match(self.text, self.at)
        if name is None:
            self.refuse("${ must be followed by a name; ${#...} and ${!...} are not read here")
        self.at = name.end()
        whole = next((each for each in ("[@]", "[*]") if self.text.startswith(each, self.at)), "")
        self.at += len(whole)
        operator = next(
            (each for each in (":-", ":=", "-", "=", ":?", "?") if self.text.startswith(each, self.at)), ""
        )
        self.at += len(operator)
        default = self._until_brace(name[0], line, is_plain=not operator)
        value = self._value(name[0])
        is_set = name[0] in self.given or name[0] in self.variables
        if "-" in operator or "=" in operator:
            is_empty = not any(word.text for word in value)
            value = default if not is_set or (":" in operator and is_empty) else value
            if "=" in operator and name[0] not in self.given:
                self.variables[name[0]] = value
        if whole == "[*]" and is_quoted:
            value = [LaunchWord(" ".join(word.text for word in value), line)]
        self._add(value if whole else value[:1], is_quoted=is_quoted)

    def _until_brace(self, name: str, line: int, *, is_plain: bool) -> list[LaunchWord]:
        """What stands between the operator behind a name and ``}``, as one word."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.refuse(f"more than {DEEPEST} ${{...}} lie in each other")
        outer, self.fields = self.fields, _Fields()
        while self.at < len(self.text) and self.text[self.at] != "}":
            if is_plain:
                self.refuse(f"${{{name}{self.text[self.at]}...}} is not read here")
            character = self.text[self.at]
            if character in " \t\n;|&<>()":
                self.fields.add(character)
                self.at += 1
            elif (plain := _PLAIN_IN_BRACES.match(self.text, self.at)) is not None:
                self.fields.add(plain[0])
                self.at = plain.end()
            else:
                self._part(character, is_bare=False, splits=False)
        if self.at >= len(self.text):
            self.refuse("${ is not closed", line)
        self.at += 1
        self.depth -= 1
        made, self.fields = " ".join(self.fields.closed()), outer
        return [LaunchWord(made, line)]

    def _value(self, name: str) -> list[LaunchWord]:
        self.read.add(name)
        if name in self.given:
            return [LaunchWord(self.given[name], self.line)]
        return self.variables.get(name, [LaunchWord(f"\0{name}\0", self.line)])

    def _add(self, value: list[LaunchWord], *, is_quoted: bool) -> None:
        """Adds a value to the word; without quotes its blanks part words."""
        self.fields.is_gone = self.fields.is_gone or not value
        for number, each in enumerate(value):
            self.made += len(each.text)
            if self.made > MOST_CHARACTERS:
                self.refuse(f"with its names replaced the text has more than {MOST_CHARACTERS:,} characters")
            if number:
                self.fields.part()
            if is_quoted:
                self.fields.add(each.text, is_quoted=True)
                continue
            first, *others = FIELD_OF_SPACE.split(each.text)
            self.fields.add(first)
            for other in others:
                self.fields.part()
                self.fields.add(other)


def _end_of_command(text: str, at: int, begin: str) -> int:
    """The place behind a command that begins before ``at``; -1 if it has no end."""
    if begin == "`":
        return text.find("`", at) + 1 or -1
    depth, quote = 1, ""
    while at < len(text):
        character = text[at]
        at += 2 if character == "\\" and quote != "'" else 1
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
            if depth == 0:
                return at
    return -1


class _Fields:
    """The words that one word of a script becomes."""

    def __init__(self) -> None:
        self.whole: list[str] = []
        self.pieces: list[str] = []
        self.is_quoted = False
        """Whether the last one counts even if it is empty."""
        self.is_gone = False
        """Whether an array without words stood in it: it then counts only if it is not empty."""

    @property
    def last(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str, *, is_quoted: bool = False) -> None:
        self.pieces.append(text)
        self.is_quoted = self.is_quoted or is_quoted

    def part(self) -> None:
        """What follows is another word."""
        if (self.is_quoted and not self.is_gone) or any(self.pieces):
            self.whole.append(self.last)
        self.pieces, self.is_quoted, self.is_gone = [], False, False

    def closed(self) -> list[str]:
        self.part()
        return self.whole


def _unescaped(following: str) -> str:
    """What a backslash and the character after it stand for between double quotes."""
    if following == "\n":
        return ""
    return following if following in '$`"\\' else f"\\{following}"
