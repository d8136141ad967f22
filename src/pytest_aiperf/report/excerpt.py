"""The part of a CUDA file that one launcher needs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<text>R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<sign>[{};])""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_WRAPPER: Final = re.compile(r'(\bnamespace\b[\w:\s]*|\bextern\s*"C"\s*)$')
_REST_OF_LINE: Final = re.compile(r"[ \t]*(?://[^\n]*)?(?=\n|\Z)")
_COMMENTS: Final = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*", re.DOTALL)
_TYPE: Final = re.compile(r"\b(?:struct|class|union|enum|using)\s+(?:alignas\([^)]*\)\s*)?(\w+)")
_CALLED: Final = re.compile(r"\b(?!__\w+__\b|alignas\b|decltype\b|requires\b)(\w+)\s*\(")
_ASSIGNED: Final = re.compile(r"\b(\w+)\s*(?:\[[^\]]*\]\s*)*[={;]")


def excerpt(text: str, launcher: str) -> str | None:
    """Cut out a launcher and everything it needs, in the file's order; None where it is not."""
    pieces = _parsed(text)
    needed: set[int] = set()
    waiting = [launcher]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        for index, (_, defines, uses) in enumerate(pieces):
            if name in defines and index not in needed:
                needed.add(index)
                waiting += sorted(uses - seen)
                seen |= uses
    return together([pieces[i][0] for i in sorted(needed)]) or None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> list[tuple[str, set[str], set[str]]]:
    return [(piece, _defines(piece), _uses(piece)) for piece in _pieces(text)]


def together(pieces: Sequence[str]) -> str:
    """Put pieces below each other, with a blank line where one of two is longer than a line."""
    text = ""
    for before, piece in zip(["", *pieces], pieces, strict=False):
        gap = "\n\n" if "\n" in before + piece else "\n"
        text += f"{gap if before else ''}{piece}"
    return text


def _pieces(text: str) -> Iterator[str]:
    """Split a file at its outermost level, each piece with the comment right above it."""
    start = 0
    for end, kept in _ends(text):
        rest = _REST_OF_LINE.match(text, end)
        stop = rest.end() if rest else end
        if kept:
            comments = _COMMENTS.match(text, start)
            code = comments.end() if comments else start
            yield (text[start:code].rpartition("\n\n")[2] + text[code:stop]).strip()
        start = stop


def _ends(text: str) -> Iterator[tuple[int, bool]]:
    """Find where each outermost piece ends, and whether it is more than a wrapper's brace."""
    depth: list[bool] = []  # of each open brace: does it only wrap (namespace, extern "C")?
    for token in _TOKEN.finditer(text):
        outside = all(depth)
        if token["directive"] or token[0] == ";":
            if outside:
                yield token.end(), True
        elif token[0] == "{":
            depth.append(outside and bool(_WRAPPER.search(text[: token.start()][-200:])))
            if depth[-1]:
                yield token.end(), False
        elif token[0] == "}":
            wrapper = depth.pop() if depth else True
            declares = text[token.end() :][:20].lstrip()[:1] == ";"  # a type or a variable
            if wrapper or (all(depth) and not declares):
                yield token.end(), not wrapper


def _bare(piece: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", piece, flags=re.DOTALL).strip()


def _defines(piece: str) -> set[str]:
    code = _bare(piece)
    if code.startswith("#"):
        return set(re.findall(r"^#\s*define\s+(\w+)", code))
    head = code.partition("{")[0]
    if code.endswith("}") or ("=" not in head and "(" in head):
        called = _CALLED.search(re.sub(r"__launch_bounds__\s*\([^)]*\)", "", head))
        return {called[1]} if called else set()
    named = _TYPE.search(re.sub(r"^template\s*<[^{;]*?>\s*(?=struct|class|using)", "", head))
    return {named[1]} if named else set(_ASSIGNED.findall(code))


def _uses(piece: str) -> set[str]:
    return set(re.findall(r"\b[A-Za-z_]\w*", _bare(piece)))
