"""Finds the lines of a CUDA source file that one launcher needs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

# the patterns below match code in which one space separates tokens
_CALLED: Final = re.compile(r"\b(?!__\w+__\b|decltype\b|requires\b)(\w+) \(")
"""A name before a parenthesis, but no attribute; the first in a function is the function's name."""
_TYPE: Final = re.compile(r"\b(?:enum (?:class|struct)|struct|class|union|enum|using) (\w+)")
_ATTRIBUTE: Final = re.compile(
    r"(?:__launch_bounds__|__align__|alignas) \((?:[^()]|\([^()]*\))*\) "
)
"""Attributes of kernels and types; without them, a parenthesis begins a function's parameters."""
_VARIABLE: Final = re.compile(r"\b(\w+) (?:\[ [^\]]*\] )*[={;]")
_WRAPPER: Final = re.compile(r'((inline )?namespace\b[^(=]*|extern " C ") \{$')
"""The beginning of a namespace or of an extern "C" block."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Literal["code", "comment", "directive"]
    text: str
    first: int  #: Its first line.
    last: int  #: Its last line.


@dataclass(frozen=True, slots=True)
class _Piece:
    """A function, type, variable or macro at file or namespace level."""

    lines: tuple[int, int]  #: The first line, or that of the comment above it, and the last line.
    defines: frozenset[str]  #: Names that it defines.
    uses: frozenset[str]  #: All names in it.


def needed(text: str, launcher: str) -> list[tuple[int, int]]:
    """Return the first and last line of the launcher and of each piece that it needs."""
    pieces = list(_pieces(text))
    spans: set[tuple[int, int]] = set()
    seen, names = {launcher}, [launcher]
    while names:
        name = names.pop()
        for piece in pieces:
            if name in piece.defines and piece.lines not in spans:
                spans.add(piece.lines)
                names += piece.uses - seen
                seen |= piece.uses
    return sorted(spans)


def _pieces(text: str) -> Iterator[_Piece]:
    """Split a file into its outermost pieces; a namespace or extern "C" block is no piece."""
    tokens: list[_Token] = []  # tokens of the current piece so far
    comment = _Token("comment", "", 0, -1)  # comment above the current piece
    wrappers: list[bool] = []  # whether each open brace belongs to a namespace or extern "C"
    complete, end = False, 0  # whether the piece may end here; last line of the previous piece
    for token in [*_tokens(text), _Token("directive", "", 0, 0)]:
        if tokens and complete and token.text != ";":
            yield _piece(tokens, comment)
            tokens, complete, end = [], False, tokens[-1].last
        if token.kind == "comment":
            if not tokens and token.first > end:
                first = comment.first if token.first == comment.last + 1 else token.first
                comment = _Token("comment", "", first, token.last)
        elif token.kind == "directive":
            if all(wrappers) and token.text:
                yield _piece([token], comment)
                end = token.last
        else:
            tokens.append(token)
            if token.text == "{":
                wraps = all(wrappers) and _WRAPPER.match(" ".join(t.text for t in tokens))
                wrappers.append(bool(wraps))
                tokens = [] if wraps else tokens
            elif token.text == "}":
                wrapped = wrappers.pop() if wrappers else True
                tokens = [] if wrapped else tokens
                complete = not wrapped and all(wrappers)
            elif token.text == ";":
                complete = all(wrappers)


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens of a file, but neither white space nor the contents of strings."""
    from pygments.lexers import CudaLexer  # imported here: only claims with CUDA kernels need it
    from pygments.token import Comment, String, Whitespace

    line, directive, start = 1, "", 1
    for _, kind, value in CudaLexer(stripnl=False).get_tokens_unprocessed(text):
        first, line = line, line + value.count("\n")
        if kind in Comment.Preproc or kind in Comment.PreprocFile:
            start = start if directive else first
            directive += value
            if value == "\n" and not directive.endswith("\\\n"):
                yield _Token("directive", directive, start, first)
                directive = ""
        elif kind in Comment:
            yield _Token("comment", value, first, line - value.endswith("\n"))
        elif kind not in Whitespace and (kind not in String or value in ('"', "C")):
            yield _Token("code", value, first, line)


def _piece(tokens: list[_Token], comment: _Token) -> _Piece:
    first, last = tokens[0].first, tokens[-1].last
    start = comment.first if comment.last == first - 1 else first
    code = " ".join(word for t in tokens for word in re.findall(r"\w+|[^\w\s]", t.text))
    names = frozenset(re.findall(r"\b[A-Za-z_]\w*", code))
    return _Piece((start, last), _defined(code), names)


def _defined(code: str) -> frozenset[str]:
    """Return the names that a piece defines; ``code`` is its tokens, joined by spaces."""
    if code.startswith("#"):
        return frozenset(re.findall(r"^# define (\w+)", code))
    head = _ATTRIBUTE.sub("", code.partition("{")[0])
    if code.endswith("}") or ("=" not in head and "(" in head):
        return frozenset(_CALLED.findall(head)[:1])
    head = re.sub(r"^template < [^{;]*? ?> (?=struct|class|using)", "", head)
    return frozenset(_TYPE.findall(head)[:1] or _VARIABLE.findall(code))
