"""Hooks of mkdocs: files outside docs/ become pages of the site, and links between them work there too."""

import re
from html import unescape
from pathlib import Path
from posixpath import dirname, relpath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("md", "svg", "png", "csv")
OUTSIDE = ["*.md", "examples/*.py", "examples/*.ipynb"]
OUTSIDE += [f"{folder}/**/*.{kind}" for folder in ("results", "benchmarks") for kind in KINDS]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, in_site(path), abs_src_path=str(path)))
    return files


def in_site(path: Path) -> str:
    """Path in the site's sources: docs/ is their root, and the README their first page."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site; a link to any other file of the repository becomes its text."""
    folder = Path(page.file.abs_src_path).parent

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # to another host; or broken, which --strict reports
        if files.get_file_from_path(in_site(path)) is None:
            return text
        return f"{image}[{text}]({relpath(in_site(path), dirname(page.file.src_uri))}{anchor or ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)", link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset equations as MathML, caption pictures, keep intervals and switches on a line, show a method's code."""

    def typeset(match: re.Match[str]) -> str:
        tag, opening, latex = match.groups()
        return f"<{tag}>{convert(unescape(latex), 'block' if opening == '[' else 'inline')}</{tag}>"

    html = re.sub(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', typeset, html, flags=re.DOTALL)
    html = re.sub(r'<p>(<img alt="([^"]+)"[^>]*>)</p>', r"<figure>\1<figcaption>\2</figcaption></figure>", html)
    html = re.sub(r"([\d.]+%?) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]", r"\1&nbsp;[\2,&nbsp;\3]", html)
    html = re.sub(r"(?<=[ >])(--[a-z][\w.]*)(?=[ <])", r'<span class="switch">\1</span>', html)
    folded = '<details class="mkdocstrings-source">'
    return html.replace(folded, folded[:-1] + " open>") if page.file.src_uri.startswith("methods/") else html
