"""Docstrings of the house style, as mkdocstrings shows sections.

`Privacy:` and `Reference:` are paragraphs in the source and sections on the site; an
`Example:` is a doctest; shapes such as f[*b] are code.
"""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(Privacy|Reference): *(.+(?:\n(?!\n).+)*)", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Yields):\n((?: .+(?:\n|$))+)", re.MULTILINE)
SHAPE = re.compile(r"(?<![`\w])(?:f|i|u|b|bool|i32|f32)\[[^\]`]*\]")


def rewritten(text: str) -> str:
    """A docstring's text for the parser of Google's style."""
    text = SECTION.sub(lambda m: f"{m[1]}:\n" + textwrap.indent(m[2], "  "), text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = RETURNS.sub(lambda m: f"{m[1]}:\n{_untyped(m[2])}", text)
    lines = text.split("\n")
    inside = False  # of a doctest
    for i, line in enumerate(lines):
        inside = bool(line.strip()) and (inside or line.lstrip().startswith(">>>"))
        if not inside:
            lines[i] = _outside_code(line)
    return "\n".join(lines)


def _untyped(text: str) -> str:
    """What is returned, where words before a colon are no type."""
    parts = text.split("`")
    parts[::2] = [re.sub(r":(?=\s)", "&#58;", part) for part in parts[::2]]
    return "`".join(parts)


def _outside_code(line: str) -> str:
    parts = line.split("`")
    parts[::2] = [SHAPE.sub(lambda m: f"\0{m[0]}\0", part) for part in parts[::2]]
    return "`".join(parts).replace("\0", "`")


class HouseStyle(griffe.Extension):
    """Rewrites each docstring when it is found."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called with every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)
