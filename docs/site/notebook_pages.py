"""Convert notebooks to pages: text, programs, and the stored outputs."""

import base64
import json
import pathlib

IMAGES = {"image/png": "png", "image/svg+xml": "svg"}


def markdown(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's page, and its pictures by name. Nothing is executed."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"]).strip()
        if not text:
            continue
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
            for output in cell["outputs"]:
                parts.append(_shown(output, path.stem, pictures))
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _shown(output: dict, stem: str, pictures: dict[str, bytes]) -> str:
    """Return the Markdown of one output: a picture if there is one, or else text."""
    data = output.get("data", {})
    for kind, ending in IMAGES.items():
        if kind in data:
            name = f"{stem}-{len(pictures) + 1}.{ending}"
            content = "".join(data[kind])
            raw = base64.b64decode(content) if ending == "png" else content.encode()
            pictures[name] = raw
            return f"![What the program above draws]({name})"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""
